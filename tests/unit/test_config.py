"""Settings: precedence, validation, unknown keys, printing."""

import tomllib
from pathlib import Path

import pytest

from radixkv.server.config import ConfigError, Loaded, format_config, load, parse_arguments
from radixkv.server.settings import OPTIONS, Address, parse_address


def load_from(*arguments: str, environ: dict[str, str] | None = None) -> Loaded:
    return load(parse_arguments(arguments), environ or {})


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "radixkv.toml"
    file.write_text('gpu_blocks = 1\nblock_size = 2\ndrain_timeout = 3\neviction = "lru"\n')
    environ = {"RADIXKV_GPU_BLOCKS": "10", "RADIXKV_BLOCK_SIZE": "20", "HOME": "/root"}
    loaded = load_from("--config", str(file), "--gpu-blocks", "100", environ=environ)
    assert loaded.settings.gpu_blocks == 100
    assert loaded.settings.block_size == 20
    assert loaded.settings.drain_timeout == 3.0
    assert loaded.settings.session_alarm == 60.0
    assert loaded.sources["gpu_blocks"] == "flag --gpu-blocks"
    assert loaded.sources["block_size"] == "environment RADIXKV_BLOCK_SIZE"
    assert loaded.sources["drain_timeout"] == f"file {file}"
    assert loaded.sources["session_alarm"] == "default"


def test_config_file_can_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "radixkv.toml"
    file.write_text("gpu_blocks = 7")
    assert load_from(environ={"RADIXKV_CONFIG": str(file)}).settings.gpu_blocks == 7


def test_printed_config_reads_back_to_the_same_settings(tmp_path: Path) -> None:
    arguments = ["--gpu-blocks", "5", "--prefault", "--http", "off", "--listen", "[::1]:0"]
    tiers = ["--cpu-blocks", "7", "--low-watermark", "2.5", "--no-break-even"]
    loaded = load_from(*arguments, *tiers, "--kv-spec", "llama-3-8b")
    file = tmp_path / "printed.toml"
    file.write_text(format_config(loaded))
    assert tomllib.loads(file.read_text())["http"] == "off"
    again = load_from("--config", str(file))
    assert again.settings == loaded.settings
    assert all(option.name in format_config(loaded) for option in OPTIONS)


def test_switches_can_be_turned_off_again() -> None:
    environ = {"RADIXKV_PREFAULT": "true", "RADIXKV_CHECK_INVARIANTS": "1"}
    settings = load_from("--gpu-blocks", "1", "--no-prefault", environ=environ).settings
    assert not settings.prefault
    assert settings.check_invariants


@pytest.mark.parametrize("value", ["0", "-1", "-0", "1.5", "many", "", "8G", "1e3", "99999999999"])
def test_block_counts_that_make_no_sense_are_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match="gpu_blocks .*whole number"):
        load_from(f"--gpu-blocks={value}")
    with pytest.raises(ConfigError, match="block_size .*RADIXKV_BLOCK_SIZE.*whole number"):
        load_from("--gpu-blocks", "1", environ={"RADIXKV_BLOCK_SIZE": value})


def test_negative_number_as_a_separate_argument_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="gpu_blocks"):
        load_from("--gpu-blocks", "-5")


def test_huge_digit_strings_are_refused_briefly() -> None:
    with pytest.raises(ConfigError) as caught:
        load_from("--gpu-blocks", "9" * 100_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["gpu_blocks = true", "gpu_blocks = 1.0", "gpu_blocks = [1]"])
def test_toml_values_of_the_wrong_type_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "radixkv.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="gpu_blocks"):
        load_from("--config", str(file))


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "soon", "1e30"])
def test_bad_seconds_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="drain_timeout"):
        load_from("--gpu-blocks", "1", f"--drain-timeout={value}")


def test_unknown_flag_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="'--gpu-block=3'; did you mean --gpu-blocks"):
        parse_arguments(["--gpu-block=3"])


def test_unknown_key_in_the_file_names_the_closest(tmp_path: Path) -> None:
    file = tmp_path / "radixkv.toml"
    file.write_text("gpu-blocks = 3")
    with pytest.raises(ConfigError, match="'gpu-blocks' in .*did you mean gpu_blocks"):
        load_from("--config", str(file))


def test_unknown_variable_names_the_closest() -> None:
    with pytest.raises(ConfigError, match="RADIXKV_GPU_BLOKS; did you mean RADIXKV_GPU_BLOCKS"):
        load_from(environ={"RADIXKV_GPU_BLOKS": "3"})


@pytest.mark.parametrize("content", [b"gpu_blocks = ", b"\xff\xfe", b"a = " + b"[" * 100_000])
def test_malformed_file_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "radixkv.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_from("--config", str(file))


def test_missing_and_oversized_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read .*absent.toml"):
        load_from("--config", str(tmp_path / "absent.toml"))
    with pytest.raises(ConfigError, match="larger than"):
        load_from("--config", "/dev/zero")


def test_gpu_blocks_must_be_given() -> None:
    with pytest.raises(ConfigError, match="--gpu-blocks 40000"):
        load_from()


def test_cuda_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="cuda"):
        load_from("--gpu-blocks", "1", "--device", "cuda")


@pytest.mark.parametrize("option", ["listen", "http"])
@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "example.org:1", "10.0.0.1:0"])
def test_g2_other_machines_only_with_an_admin_token(option: str, address: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} .*--admin-token-file"):
        load_from("--gpu-blocks", "1", f"--{option}", address)
    settings = load_from(
        "--gpu-blocks", "1", f"--{option}", address, "--admin-token-file", "/t"
    ).settings
    assert str(getattr(settings, option)) == address


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:65535", "localhost:1", "127.9.9.9:1"])
def test_loopback_addresses(text: str) -> None:
    address = parse_address(text)
    assert address is not None
    assert address.is_loopback
    assert str(address) == text


@pytest.mark.parametrize("text", ["", ":1", "host", "h:", "h:65536", "h:-1", "::1:2", "a b:1", 7])
def test_malformed_addresses(text: object) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


TIERS = ("--gpu-blocks", "9", "--kv-spec", "llama-3-8b")


def test_there_are_no_lower_tiers_unless_asked_for() -> None:
    settings = load_from("--gpu-blocks", "9").settings
    assert not settings.has_tiers
    config = settings.cache_config()
    assert (config.num_blocks, config.cpu_blocks, config.nvme_blocks, config.remote) == (
        9, 0, 0, False,
    )  # fmt: skip
    assert (config.low_watermark, config.high_watermark, config.max_pinned) == (0.05, 0.1, 0.5)
    assert (config.write_policy, config.onboarding, config.break_even) == (
        "write_back", "wait", True,
    )  # fmt: skip


def test_tiers_reach_the_core_in_its_units() -> None:
    settings = load_from(
        *TIERS, "--cpu-blocks", "20", "--nvme-path", "~/x", "--nvme-blocks", "300",
        "--remote", "mooncake://master:50051?host=10.0.0.7", "--write-policy", "selective",
        "--low-watermark", "2.5", "--high-watermark", "50", "--onboarding", "timeout",
        "--onboard-timeout", "0.25", "--no-break-even", "--verify", "all", "--movers", "8",
        "--max-pinned", "100",
    ).settings  # fmt: skip
    assert settings.has_tiers
    assert settings.nvme_path == Path.home() / "x"
    assert (settings.verify, settings.movers) == ("all", 8)
    config = settings.cache_config()
    assert (config.cpu_blocks, config.nvme_blocks, config.remote) == (20, 300, True)
    assert (config.low_watermark, config.high_watermark, config.max_pinned) == (0.025, 0.5, 1.0)
    assert (config.onboarding, config.onboard_timeout_ms) == ("timeout", 250)
    assert (config.write_policy, config.break_even) == ("selective", False)


@pytest.mark.parametrize(
    "tier",
    [
        ("--cpu-blocks", "1"),
        ("--nvme-blocks", "1", "--nvme-path", "/n"),
        ("--remote", "mooncake://127.0.0.1:1"),
    ],
)
def test_lower_tiers_need_a_kv_spec(tier: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="needs kv_spec.*--kv-spec"):
        load_from("--gpu-blocks", "9", *tier)
    assert load_from(*TIERS, *tier).settings.has_tiers


def test_the_nvme_tier_needs_a_path_and_a_size() -> None:
    with pytest.raises(ConfigError, match="nvme_blocks.*--nvme-path"):
        load_from(*TIERS, "--nvme-blocks", "5")
    with pytest.raises(ConfigError, match="nvme_path.*--nvme-blocks"):
        load_from(*TIERS, "--nvme-path", "/n")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("cpu-blocks", "-1"), ("cpu-blocks", "x"), ("nvme-blocks", "1.5"), ("write-policy", "lazy"),
        ("onboarding", "never"), ("onboard-timeout", "-1"), ("verify", "none"), ("movers", "0"),
        ("movers", "9"), ("max-pinned", "101"), ("low-watermark", "51"), ("high-watermark", "nan"),
        ("low-watermark", "-1"), ("remote", "http://h:1"), ("remote", "mooncake://h"),
        ("remote", "mooncake://:1"), ("remote", "mooncake://h:0"), ("remote", "mooncake://h:99999"),
        ("remote", "mooncake://127.0.0.1:1/path"), ("remote", "mooncake://[h:1"), ("remote", ""),
    ],
)  # fmt: skip
def test_settings_of_tiers_that_make_no_sense_are_refused_by_name(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=option.replace("-", "_")):
        load_from(*TIERS, f"--{option}={value}")


def test_watermarks_are_in_order() -> None:
    with pytest.raises(ConfigError, match="low_watermark 20 is above high_watermark 10"):
        load_from(*TIERS, "--low-watermark", "20")
    assert load_from(*TIERS, "--low-watermark", "10").settings.low_watermark == 10


def test_off_means_no_address() -> None:
    assert parse_address("off") is None
    assert parse_address("h:1") == Address("h", 1)
