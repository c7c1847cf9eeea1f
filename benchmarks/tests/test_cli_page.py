"""docs/cli.md is what the commands say of themselves, and few words besides."""

from benchmarks import cli_page


def test_the_page_of_the_command_line_is_as_the_commands_are():
    text = cli_page.PAGE.read_text()
    assert cli_page.page(text) == text, "python -m benchmarks.cli_page"
    assert len(text[: text.index("\n## Reference\n")].split()) <= 1200
