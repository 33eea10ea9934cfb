//! Writes and parses lines of JSON, each with a key and a value. Bytes that are UTF-8 are strings; others are in
//! base64.
//!
//! Invariant: [`parse_line`] reads back what [`write_line`] wrote, byte for byte.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::borrow::Cow;
use std::io::{self, Write};

/// A line. It has either `key` or `key_base64`, and either `value` or `value_base64`.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Line<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key_base64: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_base64: Option<Cow<'a, str>>,
}

/// Writes a key and its value as one line.
pub(super) fn write_line(out: &mut impl Write, key: &[u8], value: &[u8]) -> io::Result<()> {
    let (key, key_base64) = text_or_base64(key);
    let (value, value_base64) = text_or_base64(value);
    serde_json::to_writer(&mut *out, &Line { key, key_base64, value, value_base64 })?;
    out.write_all(b"\n")
}

fn text_or_base64(bytes: &[u8]) -> (Option<Cow<'_, str>>, Option<Cow<'_, str>>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (Some(Cow::Borrowed(text)), None),
        Err(_) => (None, Some(Cow::Owned(STANDARD.encode(bytes)))),
    }
}

/// Parses a line without its line feed into a key and a value.
pub(super) fn parse_line(line: &[u8]) -> Result<(Vec<u8>, Vec<u8>), String> {
    let line: Line<'_> = serde_json::from_slice(line).map_err(|error| {
        format!(
            "not an object with a key and a value ({error}): write {{\"key\": \"...\", \"value\": \"...\"}}"
        )
    })?;
    Ok((bytes_of("key", line.key, line.key_base64)?, bytes_of("value", line.value, line.value_base64)?))
}

fn bytes_of(name: &str, text: Option<Cow<'_, str>>, base64: Option<Cow<'_, str>>) -> Result<Vec<u8>, String> {
    match (text, base64) {
        (Some(text), None) => Ok(text.into_owned().into_bytes()),
        (None, Some(base64)) => STANDARD.decode(&*base64).map_err(|error| {
            format!(
                "'{name}_base64' is not base64 ({error}): use the letters A-Z a-z 0-9 + / with = at the end"
            )
        }),
        _ => Err(format!("give either '{name}', for text, or '{name}_base64', for other bytes")),
    }
}

/// Inserts bytes into a JSON object: as the string `NAME` if they are UTF-8, else as the base64 string `NAME_base64`.
pub(super) fn insert(object: &mut serde_json::Map<String, Value>, name: &str, bytes: &[u8]) {
    match text_or_base64(bytes) {
        (Some(text), _) => object.insert(name.to_owned(), text.into()),
        (None, base64) => object.insert(format!("{name}_base64"), base64.into()),
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::fuzz::{self, Change, Executions};

    #[test]
    fn text_stays_text_and_other_bytes_are_base64() {
        let mut line = Vec::new();
        write_line(&mut line, "ключ\n\"".as_bytes(), b"\xff\x00").expect("a write to memory");
        let expected = "{\"key\":\"ключ\\n\\\"\",\"value_base64\":\"/wA=\"}\n";
        assert_eq!(String::from_utf8(line).as_deref(), Ok(expected));
        let spaced = br#" { "value_base64" : "" , "key" : "\u0041" } "#;
        assert_eq!(parse_line(spaced), Ok((b"A".to_vec(), Vec::new())));
    }

    #[test]
    fn ambiguous_lines_are_refused() {
        for bad in [
            "",
            "{}",
            "[]",
            "k\tv",
            r#"{"key":"k"}"#,
            r#"{"key":"k","value":7}"#,
            r#"{"key":"k","value":null}"#,
            r#"{"key":"k","value":"v","ttl":7}"#,
            r#"{"key":"k","value":"v","value":"w"}"#,
            r#"{"key":"k","key_base64":"aw==","value":"v"}"#,
            r#"{"key":"k","value_base64":"a"}"#,
            r#"{"key":"k","value_base64":"aw"}"#,
            r#"{"key":"k","value":"v"} {}"#,
        ] {
            assert!(parse_line(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    /// Any line is either refused, or parsed into a pair that can be written and read back.
    #[test]
    fn fuzz_json_lines() {
        let executions = Executions::of("JSON lines of kv load");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(key, value, changes): (Vec<u8>, Vec<u8>, Vec<Change>)| {
            executions.one_more();
            let mut line = Vec::new();
            write_line(&mut line, &key, &value).expect("a write to memory");
            assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
            assert_eq!(parse_line(&line), Ok((key, value)));
            fuzz::change(&mut line, &changes);
            if let Ok((key, value)) = parse_line(&line) {
                let mut again = Vec::new();
                write_line(&mut again, &key, &value).expect("a write to memory");
                assert_eq!(parse_line(&again), Ok((key, value)));
            }
        });
    }
}
