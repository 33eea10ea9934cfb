//! `cargo xtask size`: counts the lines of code, comments and tests of each crate. Blank lines are not counted.

use std::collections::BTreeMap;
use std::path::Path;

use crate::tidy;

#[derive(Default)]
struct Size {
    files: usize,
    code: usize,
    comment: usize,
    test: usize,
}

/// Prints one line per crate and one for the total. Always returns true.
pub(crate) fn run(root: &Path) -> bool {
    let mut sizes: BTreeMap<String, Size> = BTreeMap::new();
    for file in tidy::files(root).iter().filter(|file| file.ends_with(".rs")) {
        match std::fs::read_to_string(root.join(file)) {
            Ok(text) => sizes.entry(crate_of(file)).or_default().add(file, &text),
            Err(error) => println!("{file}: cannot read it: {error}; its lines are not counted"),
        }
    }
    println!("{:<18} {:>7} {:>7} {:>7} {:>7}", "crate", "files", "code", "comment", "test");
    let mut whole = Size::default();
    for (name, size) in &sizes {
        println!("{}", size.row(name));
        whole.files += size.files;
        whole.code += size.code;
        whole.comment += size.comment;
        whole.test += size.test;
    }
    println!("{}", whole.row("all"));
    true
}

impl Size {
    fn add(&mut self, file: &str, text: &str) {
        self.files += 1;
        // By house style, a test module is the last item of its file.
        let mut is_test = tidy::is_test_file(file);
        for line in text.lines().map(str::trim_start).filter(|line| !line.is_empty()) {
            is_test |= line == "mod tests {";
            if is_test {
                self.test += 1;
            } else if line.starts_with("//") {
                self.comment += 1;
            } else {
                self.code += 1;
            }
        }
    }

    fn row(&self, name: &str) -> String {
        format!("{name:<18} {:>7} {:>7} {:>7} {:>7}", self.files, self.code, self.comment, self.test)
    }
}

/// Returns the folder of the crate that `file` belongs to, such as `crates/remote` or `bench`.
fn crate_of(file: &str) -> String {
    let depth = if file.starts_with("crates/") { 2 } else { 1 };
    file.split('/').take(depth).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_is_counted_once_and_blank_lines_are_not() {
        let text = "//! a\n\nfn f() {} // b\n// c\n#[cfg(test)]\nmod tests {\n    // d\n}\n";
        let mut size = Size::default();
        size.add("crates/remote/src/op.rs", text);
        assert_eq!((size.files, size.code, size.comment, size.test), (1, 2, 2, 3));

        let mut size = Size::default();
        size.add("crates/remote/tests/op.rs", text);
        assert_eq!((size.code, size.comment, size.test), (0, 0, 7));
    }

    #[test]
    fn a_file_belongs_to_its_crate() {
        assert_eq!(crate_of("crates/remote/src/op.rs"), "crates/remote");
        assert_eq!(crate_of("bench/src/lib.rs"), "bench");
    }
}
