//! What the README shows is what the example does. The README's code is also compiled and run, as a doctest of the
//! library.

const README: &str = include_str!("../../../../README.md");
const EXAMPLE: &str = include_str!("../../examples/hello.rs");

#[test]
fn the_readme_shows_the_example_word_for_word() {
    let code: Vec<&str> =
        EXAMPLE.lines().skip_while(|line| line.starts_with("//!") || line.is_empty()).collect();
    assert!(code[0].starts_with("fn main()"), "the example is its header, then its code");
    let shown = README.split("```rust\n").nth(1).and_then(|rest| rest.split("```").next());
    let shown: Vec<&str> = shown.expect("the README has Rust code").lines().collect();
    assert_eq!(shown, code, "change README.md and examples/hello.rs together");
}

/// What is typed and what comes back is the same in every language; comments are not.
#[test]
fn both_readmes_show_the_same_commands_and_answers() {
    const CHINESE: &str = include_str!("../../../../README.zh-CN.md");
    let blocks = |text: &'static str| -> Vec<Vec<&str>> {
        let inside = text.split("\n```").skip(1).step_by(2);
        let uncommented = |line: &'static str| line.split(" # ").next().expect("a part at least").trim_end();
        inside.map(|block| block.lines().map(uncommented).collect()).collect()
    };
    let (english, chinese) = (blocks(README), blocks(CHINESE));
    for (english, chinese) in english.iter().zip(&chinese) {
        assert_eq!(english, chinese, "change README.md and README.zh-CN.md together");
    }
    assert_eq!(english.len(), chinese.len());
}
