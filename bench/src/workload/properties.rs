//! Java property files, as YCSB reads them.
//!
//! Invariant: each property keeps the number of its first line, so that an error can name the line.

use std::fmt;
use std::iter::Peekable;
use std::str::Chars;

/// One `key=value` property of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Property {
    /// Number of the property's first line, from 1.
    pub line: usize,
    /// Text before the separator, with escapes resolved.
    pub key: String,
    /// Text after the separator, with escapes resolved.
    pub value: String,
}

/// Error: a line contains an invalid escape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntaxError {
    /// Number of the property's first line, from 1.
    pub line: usize,
    /// The invalid escape.
    pub escape: String,
}

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "line {}: '{}' is not \\u and four hexadecimal digits of a character",
            self.line, self.escape
        )
    }
}

impl std::error::Error for SyntaxError {}

/// Parses the properties of `text`, in order. Keys may repeat; as in Java, the last one counts.
pub(super) fn parse(text: &str) -> Result<Vec<Property>, SyntaxError> {
    logical_lines(text).into_iter().map(|(line, content)| property(line, &content)).collect()
}

/// Returns the lines with content, each with the number of its first line. Skips comments and empty lines. Joins a
/// line that ends in an odd number of backslashes with the next line.
fn logical_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines = Vec::new();
    let mut natural = text.lines().map(str::trim_start).zip(1..);
    while let Some((first, number)) = natural.next() {
        if first.is_empty() || first.starts_with(['#', '!']) {
            continue;
        }
        let mut content = first.to_owned();
        while ends_in_odd_backslashes(&content) {
            content.pop();
            match natural.next() {
                Some((more, _)) => content.push_str(more),
                None => break,
            }
        }
        lines.push((number, content));
    }
    lines
}

fn ends_in_odd_backslashes(line: &str) -> bool {
    line.bytes().rev().take_while(|&byte| byte == b'\\').count() % 2 == 1
}

/// Splits a line at the first `=`, `:` or blank that is not escaped.
fn property(line: usize, content: &str) -> Result<Property, SyntaxError> {
    let mut rest = content.chars().peekable();
    let key = unescape(line, &mut rest, |c| matches!(c, '=' | ':') || c.is_whitespace())?;
    skip_blanks(&mut rest);
    if rest.next_if(|c| matches!(c, '=' | ':')).is_some() {
        skip_blanks(&mut rest);
    }
    // Java keeps blanks at the end of a value. Here they are removed, so that a number with a blank remains a number.
    let value = unescape(line, &mut rest, |_| false)?.trim_end().to_owned();
    Ok(Property { line, key, value })
}

fn skip_blanks(rest: &mut Peekable<Chars<'_>>) {
    while rest.next_if(|c| c.is_whitespace()).is_some() {}
}

/// Takes characters up to the first character for which `ends` holds, and resolves their escapes.
fn unescape(
    line: usize,
    rest: &mut Peekable<Chars<'_>>,
    ends: impl Fn(char) -> bool,
) -> Result<String, SyntaxError> {
    let mut out = String::new();
    while let Some(c) = rest.next_if(|&c| !ends(c)) {
        out.push(match c {
            '\\' => match rest.next() {
                Some('t') => '\t',
                Some('n') => '\n',
                Some('r') => '\r',
                Some('f') => '\u{c}',
                Some('u') => unicode(line, rest)?,
                Some(other) => other,
                None => break,
            },
            plain => plain,
        });
    }
    Ok(out)
}

/// Decodes the four hexadecimal digits after `\u`.
fn unicode(line: usize, rest: &mut Peekable<Chars<'_>>) -> Result<char, SyntaxError> {
    let digits: String = rest.take(4).collect();
    let complete = digits.len() == 4 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let code = complete.then(|| u32::from_str_radix(&digits, 16).ok()).flatten();
    code.and_then(char::from_u32).ok_or_else(|| SyntaxError { line, escape: format!("\\u{digits}") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<(usize, String, String)> {
        parse(text).unwrap().into_iter().map(|p| (p.line, p.key, p.value)).collect()
    }

    fn one(line: usize, key: &str, value: &str) -> Vec<(usize, String, String)> {
        vec![(line, key.to_owned(), value.to_owned())]
    }

    #[test]
    fn comments_and_empty_lines_are_skipped() {
        assert_eq!(parsed("# a=b\n\n  ! c=d\n \t\n"), []);
        assert_eq!(parsed("#continued \\\na=b"), one(2, "a", "b"), "a comment does not continue");
    }

    #[test]
    fn every_separator_ends_a_key() {
        for text in ["k=v", "k:v", "k v", "  k  =  v  ", "k\t:\tv", "k \t v\r\n"] {
            assert_eq!(parsed(text), one(1, "k", "v"), "{text:?}");
        }
        assert_eq!(parsed("k"), one(1, "k", ""));
        assert_eq!(parsed("k=a=b:c d"), one(1, "k", "a=b:c d"));
        assert_eq!(parsed("=v"), one(1, "", "v"));
    }

    #[test]
    fn a_backslash_continues_a_line_which_keeps_its_first_number() {
        assert_eq!(
            parsed("\nk = a,\\\n     b,\\\n     c\nl=1"),
            [one(2, "k", "a,b,c"), one(5, "l", "1")].concat()
        );
        assert_eq!(parsed("k=a\\\\\nl=1"), [one(1, "k", "a\\"), one(2, "l", "1")].concat());
        assert_eq!(parsed("k=a\\"), one(1, "k", "a"));
    }

    #[test]
    fn escapes_are_resolved() {
        assert_eq!(parsed(r"a\=b\ c=\t\u00e9\q\#"), one(1, "a=b c", "\téq#"));
    }

    #[test]
    fn a_broken_escape_names_its_line() {
        for (text, escape) in
            [("\nk=\\u12", "\\u12"), ("\nk=\\u12zz", "\\u12zz"), ("\nk=\\ud800!", "\\ud800")]
        {
            let error = parse(text).unwrap_err();
            assert_eq!(error, SyntaxError { line: 2, escape: escape.to_owned() });
            assert!(error.to_string().starts_with("line 2: '\\u"));
        }
    }
}
