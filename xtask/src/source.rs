//! A Rust file as lines whose code, comments and test parts are told apart.
//!
//! Invariant: a character of the file is shown in at most one of a line's `code` and `comment`, in its own
//! column; elsewhere that column is blank. What strings and character literals hold is shown in neither.
//!
//! It is a reader for house rules, not a parser: it knows just enough of the language to see what is code.

/// One line of a Rust file.
#[derive(Debug)]
pub(crate) struct Line {
    /// The line without its comments and without what its literals hold.
    pub(crate) code: String,
    /// The text of its comments, the slashes included.
    pub(crate) comment: String,
    /// It is part of something compiled for tests only.
    pub(crate) test: bool,
}

impl Line {
    pub(crate) fn is_blank(&self) -> bool {
        self.code.trim().is_empty() && self.comment.trim().is_empty()
    }

    pub(crate) fn is_comment(&self) -> bool {
        self.code.trim().is_empty() && !self.comment.trim().is_empty()
    }
}

/// Reads the lines of a Rust file.
pub(crate) fn lines(text: &str) -> Vec<Line> {
    let (code, comment) = split(text);
    let mut lines: Vec<Line> = code
        .lines()
        .zip(comment.lines())
        .map(|(code, comment)| Line { code: code.into(), comment: comment.into(), test: false })
        .collect();
    mark_tests(&code, &mut lines);
    lines
}

/// Columns of `code` at which `word` begins, standing alone.
pub(crate) fn columns_of(code: &str, word: &str) -> impl Iterator<Item = usize> {
    let is_alone = move |at: usize| {
        let before = code[..at].chars().next_back();
        let after = code[at + word.len()..].chars().next();
        !before.is_some_and(is_name) && !after.is_some_and(is_name)
    };
    code.match_indices(word).map(|(at, _)| at).filter(move |at| is_alone(*at))
}

/// Whether `word` stands alone somewhere in `code`.
pub(crate) fn has_word(code: &str, word: &str) -> bool {
    columns_of(code, word).next().is_some()
}

fn is_name(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// What the reader is inside of.
#[derive(Clone, Copy)]
enum Inside {
    Code,
    LineComment,
    /// Block comments nest.
    BlockComment {
        depth: usize,
    },
    String,
    RawString {
        hashes: usize,
    },
}

/// The text twice, with all but the code, and all but the comments, blanked.
fn split(text: &str) -> (String, String) {
    let letters: Vec<char> = text.chars().collect();
    let starts = |at: usize, what: &str| what.chars().eq(letters[at..].iter().copied().take(what.len()));
    let (mut code, mut comment) = (String::new(), String::new());
    let mut inside = Inside::Code;
    let mut at = 0;
    while at < letters.len() {
        // How many letters are taken at once, and whether they are code or comment or neither.
        let mut taken = 1;
        let (mut is_code, mut is_comment) = (false, false);
        match inside {
            Inside::Code if starts(at, "//") => {
                inside = Inside::LineComment;
                is_comment = true;
            }
            Inside::Code if starts(at, "/*") => {
                (inside, taken, is_comment) = (Inside::BlockComment { depth: 1 }, 2, true);
            }
            Inside::Code => {
                is_code = true;
                let follows_name = at > 0 && is_name(letters[at - 1]);
                if letters[at] == '"' {
                    inside = Inside::String;
                } else if letters[at] == '\'' {
                    (taken, is_code) = char_literal(&letters[at..]).map_or((1, true), |len| (len, false));
                } else if let Some((len, hashes)) = raw_string_start(&letters[at..])
                    && !follows_name
                {
                    (inside, taken) = (Inside::RawString { hashes }, len);
                }
            }
            Inside::LineComment => {
                is_comment = true;
                if letters[at] == '\n' {
                    inside = Inside::Code;
                }
            }
            Inside::BlockComment { depth } => {
                is_comment = true;
                if starts(at, "/*") {
                    (inside, taken) = (Inside::BlockComment { depth: depth + 1 }, 2);
                } else if starts(at, "*/") {
                    taken = 2;
                    inside =
                        if depth == 1 { Inside::Code } else { Inside::BlockComment { depth: depth - 1 } };
                }
            }
            Inside::String => match letters[at] {
                '\\' => taken = 2,
                '"' => (inside, is_code) = (Inside::Code, true),
                _ => {}
            },
            Inside::RawString { hashes } => {
                if starts(at, &format!("\"{}", "#".repeat(hashes))) {
                    (inside, taken, is_code) = (Inside::Code, 1 + hashes, true);
                }
            }
        }
        for &letter in letters[at..].iter().take(taken) {
            let shown = |shown: bool| if shown || letter == '\n' { letter } else { ' ' };
            code.push(shown(is_code));
            comment.push(shown(is_comment));
        }
        at += taken;
    }
    (code, comment)
}

/// Length of the character literal at the start of `letters`, which begin with a quote; a lifetime has none.
fn char_literal(letters: &[char]) -> Option<usize> {
    if letters.get(1) == Some(&'\\') {
        let close = letters.iter().skip(3).position(|&letter| letter == '\'')?;
        return Some(close + 4);
    }
    (letters.get(2) == Some(&'\'')).then_some(3)
}

/// Length and hashes of the opening of a raw string, if `letters` begin with one.
fn raw_string_start(letters: &[char]) -> Option<(usize, usize)> {
    let prefix = match letters {
        ['r', ..] => 1,
        ['b' | 'c', 'r', ..] => 2,
        _ => return None,
    };
    let hashes = letters[prefix..].iter().take_while(|&&letter| letter == '#').count();
    (letters.get(prefix + hashes) == Some(&'"')).then_some((prefix + hashes + 1, hashes))
}

/// Marks the lines of every item under `#[cfg(test)]`, and of a whole file under `#![cfg(test)]`.
fn mark_tests(code: &str, lines: &mut [Line]) {
    for opening in ["#![cfg(", "#[cfg("] {
        for (start, _) in code.match_indices(opening) {
            let condition_start = start + opening.len();
            let Some(condition_len) = code[condition_start..].find(']') else { continue };
            let condition_end = condition_start + condition_len;
            let condition = &code[condition_start..condition_end];
            if !has_word(condition, "test") || condition.contains("not(") {
                continue;
            }
            let end = if opening.starts_with("#!") { code.len() } else { item_end(code, condition_end + 1) };
            let first = code[..start].matches('\n').count();
            let last = code[..end].matches('\n').count();
            for line in lines.iter_mut().take(last + 1).skip(first) {
                line.test = true;
            }
        }
    }
}

/// Where the item that begins at `start` ends: after its body, or at its semicolon if it has none.
fn item_end(code: &str, start: usize) -> usize {
    let mut depth = 0_usize;
    for (offset, letter) in code[start..].char_indices() {
        match letter {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => {
                depth = depth.saturating_sub(1);
                if letter == '}' && depth == 0 {
                    return start + offset;
                }
            }
            ';' if depth == 0 => return start + offset,
            _ => {}
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code_of(line: &str) -> String {
        lines(line).remove(0).code.trim_end().to_owned()
    }

    #[test]
    fn comments_are_not_code() {
        assert_eq!(code_of("let a = 1; // unsafe"), "let a = 1;");
        assert_eq!(code_of("a /* b /* c */ d */ e"), "a                   e");
        assert_eq!(lines("/* one\ntwo */ three")[1].comment.trim(), "two */");
        assert_eq!(lines("/* one\ntwo */ three")[1].code.trim(), "three");
    }

    #[test]
    fn what_a_literal_holds_is_not_code() {
        assert_eq!(code_of(r#"f("unsafe // \" {", x)"#), r#"f("              ", x)"#);
        assert_eq!(code_of(r###"f(r#"a " b"#, x)"###), r###"f(r#"     "#, x)"###);
        assert_eq!(code_of(r###"f(br"\", x)"###), r###"f(br" ", x)"###);
        assert_eq!(code_of(r"g('{', '\'', b'\\', '\u{7b}', '/')"), "g(   ,     , b    ,         ,    )");
        assert_eq!(lines("let s = \"one // \ntwo\"; // three")[1].comment.trim(), "// three");
    }

    #[test]
    fn lifetimes_and_raw_names_are_code() {
        assert_eq!(code_of("fn f<'a>(x: &'a str, y: &'static str)"), "fn f<'a>(x: &'a str, y: &'static str)");
        assert_eq!(code_of("let r#type = bar\"x\";"), "let r#type = bar\" \";");
    }

    #[test]
    fn a_word_stands_alone() {
        assert!(has_word("unsafe { x }", "unsafe"));
        assert!(has_word("x=unsafe{y}", "unsafe"));
        assert!(!has_word("forbid(unsafe_code)", "unsafe"));
        assert!(!has_word("an_unsafe", "unsafe"));
    }

    #[test]
    fn test_items_are_marked_and_what_follows_is_not() {
        let text = "use a;\n#[cfg(test)]\nmod tests {\n    fn f(x: [u8; 4]) {}\n}\nfn g() {}\n\
                    #[cfg(all(test, unix))]\nuse b;\nfn h() {}\n#[cfg(not(test))]\nfn i() {}\n";
        let marked: Vec<bool> = lines(text).iter().map(|line| line.test).collect();
        assert_eq!(marked, [false, true, true, true, true, false, true, true, false, false, false]);
        assert!(lines("//! a\n#![cfg(test)]\nfn f() {}\n").iter().skip(1).all(|line| line.test));
    }
}
