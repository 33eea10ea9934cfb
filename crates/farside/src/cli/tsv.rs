//! Writes and parses lines `key TAB value`. The escapes `\t`, `\n`, `\r`, `\\` and `\xHH` represent bytes that a line
//! cannot contain.
//!
//! Invariant: [`parse_line`] reads back what [`write_line`] wrote, byte for byte.
//! Invariant: a written line is printable ASCII, except for its tab.

use std::io::{self, Write};

/// Writes a key and its value as one line.
pub(super) fn write_line(out: &mut impl Write, key: &[u8], value: &[u8]) -> io::Result<()> {
    write_escaped(out, key)?;
    out.write_all(b"\t")?;
    write_escaped(out, value)?;
    out.write_all(b"\n")
}

fn write_escaped(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let plain = rest.iter().take_while(|&&b| matches!(b, b' '..=b'~') && b != b'\\').count();
        out.write_all(&rest[..plain])?;
        rest = &rest[plain..];
        if let Some((&byte, after)) = rest.split_first() {
            match byte {
                b'\t' => out.write_all(b"\\t")?,
                b'\n' => out.write_all(b"\\n")?,
                b'\r' => out.write_all(b"\\r")?,
                b'\\' => out.write_all(b"\\\\")?,
                _ => write!(out, "\\x{byte:02x}")?,
            }
            rest = after;
        }
    }
    Ok(())
}

/// Parses a line without its line feed into a key and a value. Only tabs, line feeds and backslashes need escapes.
pub(super) fn parse_line(line: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
    let tab = line.iter().position(|&byte| byte == b'\t');
    let tab =
        tab.ok_or("no tab between a key and a value: write KEY<tab>VALUE, and a tab in either as \\t")?;
    let value = &line[tab + 1..];
    if value.contains(&b'\t') {
        return Err("there is a second tab: write a tab in a key or value as \\t".into());
    }
    Ok((unescape(&line[..tab])?, unescape(value)?))
}

fn unescape(text: &[u8]) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.iter();
    while let Some(&byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        bytes.push(match rest.next() {
            Some(b't') => b'\t',
            Some(b'n') => b'\n',
            Some(b'r') => b'\r',
            Some(b'\\') => b'\\',
            Some(b'x') => {
                let digits = rest.as_slice().get(..2).and_then(|digits| std::str::from_utf8(digits).ok());
                let byte = digits.filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()));
                let byte = byte.and_then(|digits| u8::from_str_radix(digits, 16).ok());
                let byte = byte.ok_or("\\x is not followed by two hexadecimal digits")?;
                rest.nth(1);
                byte
            }
            _ => return Err("a backslash is not followed by t, n, r, x or \\: write it as \\\\".into()),
        });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::fuzz::{self, Change, Executions};

    #[test]
    fn every_byte_survives_a_printable_line() {
        let all: Vec<u8> = (0..=255).chain(*b"\\x41 \\\\t").collect();
        for (key, value) in [(&all[..], &all[..]), (b"k", b""), (b"a\tb", b"\n\r")] {
            let mut line = Vec::new();
            write_line(&mut line, key, value).expect("a write to memory");
            assert_eq!(line.pop(), Some(b'\n'));
            assert!(line.iter().all(|&b| matches!(b, b' '..=b'~' | b'\t')));
            assert_eq!(parse_line(&line), Ok((key.to_vec(), value.to_vec())));
        }
    }

    #[test]
    fn ambiguous_lines_are_refused() {
        for bad in
            [&b"no tab"[..], b"a\tb\tc", b"a\\\tb", b"a\t\\x4", b"a\t\\xg0", b"a\t\\q", b"a\t\\", b"a\t\\x+1"]
        {
            assert!(parse_line(bad).is_err(), "{}", bad.escape_ascii());
        }
        assert_eq!(parse_line("ключ\tзначение".as_bytes()).map(|(k, _)| k), Ok("ключ".as_bytes().to_vec()));
    }

    /// Any line is either refused, or parsed into a pair that can be written and read back.
    #[test]
    fn fuzz_lines() {
        let executions = Executions::of("lines of kv load");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(key, value, changes): (Vec<u8>, Vec<u8>, Vec<Change>)| {
            executions.one_more();
            let mut line = Vec::new();
            write_line(&mut line, &key, &value).expect("a write to memory");
            line.pop();
            assert_eq!(parse_line(&line), Ok((key, value)));
            fuzz::change(&mut line, &changes);
            if let Ok((key, value)) = parse_line(&line) {
                let mut again = Vec::new();
                write_line(&mut again, &key, &value).expect("a write to memory");
                again.pop();
                assert_eq!(parse_line(&again), Ok((key, value)));
            }
        });
    }
}
