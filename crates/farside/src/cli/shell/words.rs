//! Splits lines of the shell into words, and quotes bytes for a terminal.
//!
//! - A word ends at a blank.
//! - `"..."` is a word that may contain blanks and the escapes `\n`, `\r`, `\t`, `\\`, `\"` and `\xHH`.
//! - `'...'` is a word in which every byte stands for itself, except for the escape `\'`.
//!
//! Invariant: [`split`] reads what [`quoted`] wrote as one word, byte for byte. The quoted text contains no control
//! sequence of terminals.

/// Splits a line into words. Returns none for an empty line, and for a comment, whose first word begins with `#`.
pub(in crate::cli) fn split(line: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let mut words = Vec::new();
    let mut rest = line.trim_ascii_start();
    if rest.starts_with(b"#") {
        return Ok(words);
    }
    while let Some(&first) = rest.first() {
        let (word, after) = match first {
            b'"' => double(&rest[1..])?,
            b'\'' => single(&rest[1..])?,
            _ => bare(rest)?,
        };
        if after.first().is_some_and(|byte| !byte.is_ascii_whitespace()) {
            return Err("a closing quote is not followed by a blank: put a blank between two words".into());
        }
        words.push(word);
        rest = after.trim_ascii_start();
    }
    Ok(words)
}

type Word<'a> = Result<(Vec<u8>, &'a [u8]), String>;

fn bare(text: &[u8]) -> Word<'_> {
    let end = text.iter().position(u8::is_ascii_whitespace).unwrap_or(text.len());
    let (word, after) = text.split_at(end);
    if word.iter().any(|byte| matches!(byte, b'"' | b'\'')) {
        return Err(r#"a quote is in the middle of a word: quote the whole word, as in "it's""#.into());
    }
    Ok((word.to_vec(), after))
}

fn double(text: &[u8]) -> Word<'_> {
    let mut word = Vec::new();
    let mut rest = text;
    loop {
        let Some((&byte, after)) = rest.split_first() else {
            return Err(
                r#"a double quote is not closed: end the word with ", and write \" for a quote within it"#
                    .into(),
            );
        };
        rest = after;
        match byte {
            b'"' => return Ok((word, rest)),
            b'\\' => {
                let (byte, after) = escape(rest)?;
                word.push(byte);
                rest = after;
            }
            _ => word.push(byte),
        }
    }
}

fn escape(text: &[u8]) -> Result<(u8, &[u8]), String> {
    let unknown = || {
        r#"unknown escape: in double quotes, \n \r \t \" \\ and \xHH are possible; write a backslash as \\"#
            .to_owned()
    };
    let (&byte, after) = text.split_first().ok_or_else(unknown)?;
    Ok(match byte {
        b'n' => (b'\n', after),
        b'r' => (b'\r', after),
        b't' => (b'\t', after),
        b'"' | b'\\' => (byte, after),
        b'x' => {
            let digit = |at: usize| after.get(at).and_then(|&byte| char::from(byte).to_digit(16));
            let byte = digit(0).zip(digit(1)).map(|(high, low)| (high << 4 | low) as u8);
            (byte.ok_or("\\x is not followed by two hexadecimal digits")?, &after[2..])
        }
        _ => return Err(unknown()),
    })
}

fn single(text: &[u8]) -> Word<'_> {
    let mut word = Vec::new();
    let mut rest = text;
    loop {
        match rest {
            [b'\\', b'\'', after @ ..] => {
                word.push(b'\'');
                rest = after;
            }
            [b'\'', after @ ..] => return Ok((word, after)),
            [byte, after @ ..] => {
                word.push(*byte);
                rest = after;
            }
            [] => {
                return Err(
                    r"a single quote is not closed: end the word with ', and write \' for a quote within it"
                        .into(),
                );
            }
        }
    }
}

/// Quotes bytes in double quotes. Letters and digits of any script stay unchanged. Characters that could move the
/// cursor or change the direction of text are escaped.
pub(in crate::cli) fn quoted(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() + 2);
    text.push('"');
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\n' => text.push_str("\\n"),
                '\r' => text.push_str("\\r"),
                '\t' => text.push_str("\\t"),
                '"' => text.push_str("\\\""),
                '\\' => text.push_str("\\\\"),
                ' '..='~' => text.push(character),
                _ if character.is_alphanumeric() => text.push(character),
                _ => {
                    let mut buffer = [0; 4];
                    character.encode_utf8(&mut buffer).bytes().for_each(|byte| push_hex(&mut text, byte));
                }
            }
        }
        chunk.invalid().iter().for_each(|&byte| push_hex(&mut text, byte));
    }
    text.push('"');
    text
}

fn push_hex(text: &mut String, byte: u8) {
    text.push_str(&format!("\\x{byte:02x}"));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::fuzz::{self, Change, Executions};

    fn words(line: &str) -> Vec<String> {
        let words = split(line.as_bytes()).expect(line);
        words.into_iter().map(|word| String::from_utf8(word).expect("text")).collect()
    }

    #[test]
    fn words_end_at_blanks_and_quotes_hold_blanks() {
        assert_eq!(words("put a b"), ["put", "a", "b"]);
        assert_eq!(words("  put\ta   b \r\n"), ["put", "a", "b"]);
        assert_eq!(words(r#"put "a b" 'c d' """#), ["put", "a b", "c d", ""]);
        assert_eq!(
            words(r#"put k "\x41\t\n\r\\\"" 'it\'s "\n"'"#),
            ["put", "k", "A\t\n\r\\\"", r#"it's "\n""#]
        );
        assert_eq!(words(r"put a\b #c"), ["put", r"a\b", "#c"]);
        assert_eq!(words("ключ 键"), ["ключ", "键"]);
        for nothing in ["", "  ", "# put a b", "   #", "#\"unclosed"] {
            assert!(words(nothing).is_empty(), "{nothing}");
        }
    }

    #[test]
    fn ambiguous_lines_are_refused() {
        for bad in [r#"get "a"#, "get 'a", r#"get "a"b"#, "get 'a'b", r#"get a"b"#, "put k it's"] {
            assert!(split(bad.as_bytes()).is_err(), "{bad}");
        }
        for bad in [r#"get "\q""#, r#"get "\x4""#, r#"get "\xg0""#, r#"get "\x+1""#, r#"get "\"#] {
            assert!(split(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn control_sequences_are_escaped() {
        let hostile = "\x1b]0;title\x07\u{202e}\u{9b}2J\u{200b}\x7f";
        let shown = quoted(hostile.as_bytes());
        assert!(shown.bytes().all(|byte| matches!(byte, b' '..=b'~')), "{shown}");
        assert_eq!(quoted("键 7".as_bytes()), "\"键 7\"");
    }

    /// Quoted bytes are read back as one word. Any line is either refused, or split into words that can be quoted and
    /// read back.
    #[test]
    fn fuzz_lines_of_the_shell() {
        let executions = Executions::of("lines of the shell");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(all, changes): (Vec<Vec<u8>>, Vec<Change>)| {
            executions.one_more();
            let line = |words: &[Vec<u8>]| {
                words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ").into_bytes()
            };
            let mut text = line(&all);
            assert!(!text.iter().any(u8::is_ascii_control));
            assert_eq!(split(&text).as_ref(), Ok(&all));
            fuzz::change(&mut text, &changes);
            if let Ok(words) = split(&text) {
                assert_eq!(split(&line(&words)), Ok(words));
            }
        });
    }
}
