//! Tests that the README's program is the example, that its commands run, and that both languages show the same code.
//!
//! The README's program is also compiled and run, as a doctest of the library.

use crate::support::{Process, command, run};

const README: &str = include_str!("../../../../README.md");
const CHINESE: &str = include_str!("../../../../README.zh-CN.md");
const EXAMPLE: &str = include_str!("../../examples/hello.rs");

/// Maximum number of lines of a README.
const LINES_MAX: usize = 150;
/// Maximum number of characters of a README's line.
const COLUMNS_MAX: usize = 120;

/// README commands that take minutes. For each: the command, the source file that runs it with fewer records, and the
/// text by which that file is recognized as running it.
const RUN_ELSEWHERE: [(&str, &str, &str); 3] = [
    ("cargo run --release -- demo", include_str!("cli/demo.rs"), r#"args(["demo", "#),
    ("cargo test --workspace", include_str!("../../../../xtask/src/check.rs"), r#"["test", "--workspace", "#),
    ("farside bench compare --rounds 25", include_str!("cli/comparison.rs"), r#"["bench", "compare", "#),
];

/// Returns the lines of every fenced block, without their comments.
fn blocks(text: &'static str) -> Vec<Vec<&'static str>> {
    let inside = text.split("\n```").skip(1).step_by(2);
    let uncommented = |line: &'static str| line.split(" # ").next().expect("a part at least").trim_end();
    inside.map(|block| block.lines().map(uncommented).collect()).collect()
}

#[test]
fn the_readme_shows_the_example_word_for_word() {
    let code: Vec<&str> =
        EXAMPLE.lines().skip_while(|line| line.starts_with("//!") || line.is_empty()).collect();
    assert!(code[0].starts_with("fn main()"), "the example is its header, then its code");
    let shown = README.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next());
    let shown: Vec<&str> = shown.expect("the README has Rust code").lines().collect();
    assert_eq!(shown, code, "change README.md and examples/hello.rs together");
}

#[test]
fn both_readmes_show_the_same_commands_and_answers() {
    let (english, chinese) = (blocks(README), blocks(CHINESE));
    for (english, chinese) in english.iter().zip(&chinese) {
        assert_eq!(english, chinese, "change README.md and README.zh-CN.md together");
    }
    assert_eq!(english.len(), chinese.len());
}

#[test]
fn both_readmes_are_short() {
    for text in [README, CHINESE] {
        assert!(text.lines().count() <= LINES_MAX, "move details to docs/guide");
        let long: Vec<&str> = text.lines().filter(|line| line.chars().count() > COLUMNS_MAX).collect();
        assert!(long.is_empty(), "break these lines: {long:#?}");
    }
}

/// Runs all commands but the long ones of [`RUN_ELSEWHERE`], which other tests run with fewer records.
#[test]
fn every_command_of_the_readme_runs_and_answers_as_shown() {
    let folder = tempfile::tempdir().expect("a folder");
    let farside = |line: &str| {
        let mut command = command();
        command.env("XDG_RUNTIME_DIR", folder.path()).args(line.split_whitespace().skip(1));
        command
    };
    let mut node = None;
    let mut seen = 0;
    for block in blocks(README) {
        let (language, lines) = block.split_first().expect("a fence");
        let mut lines = lines.iter().copied().peekable();
        while let Some(line) = lines.next().filter(|_| ["sh", "console"].contains(language)) {
            seen += 1;
            let line = line.strip_prefix("$ ").unwrap_or(line);
            let mut answer = String::new();
            while let Some(shown) = lines.next_if(|next| *language == "console" && !next.starts_with("$ ")) {
                answer += shown;
                answer.push('\n');
            }
            if let Some((_, test, words)) = RUN_ELSEWHERE.iter().find(|(long, ..)| *long == line) {
                assert!(test.contains(words), "no test runs '{line}' any more");
                continue;
            }
            assert!(line.starts_with("farside "), "no test runs '{line}': leave it out of the README");
            match line {
                "farside up" => {
                    let up = Process::start(farside(line), folder.path().join("log"));
                    while !up.line().contains("Ctrl-C") {}
                    node = Some(up);
                }
                // Exits with 2 where this machine lacks something.
                "farside doctor" => {
                    let ran = run(farside(line), b"");
                    assert!(matches!(ran.code, Some(0 | 2)) && !ran.out.is_empty(), "{}", ran.err);
                }
                _ => {
                    let ran = run(farside(line), b"").done();
                    assert_eq!(ran.text().trim_end(), answer.trim_end(), "{line}");
                }
            }
        }
    }
    assert!(seen >= 6, "the README's commands are found: {seen}");
    assert!(node.is_some(), "the README starts a node");
}
