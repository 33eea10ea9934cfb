//! Drawings of violations are complete, deterministic, and well-formed XML.

use crate::support::operations::{DONE, NEVER, cas, found, found_at, history, put};
use farside_sim::history::register::{Ask, Outcome};
use farside_sim::linearizable::{Limits, Violation, explain};
use farside_sim::picture;

/// Returns a violation: a read returns an older value after a delete, while other operations have an unknown fate.
fn resurrection() -> Violation {
    let rows = [
        (0, 100, 480, put(1), Outcome::Done(None)),
        (0, 510, 900, put(2), DONE),
        (1, 700, NEVER, put(3), Outcome::Unknown),
        (2, 720, 990, Ask::Get, found_at(2, 7)),
        (2, 1_000, 1_020, cas(7, 4), Outcome::Unknown),
        (0, 1_200, 1_450, Ask::Delete, DONE),
        (2, 1_500, 1_620, Ask::Get, found(3)),
        (2, 1_700, 1_850, Ask::Get, Outcome::Absent),
        (0, 2_100, 2_200, Ask::Get, found(3)),
    ];
    explain(&history(&rows), 0, Limits::default()).expect("value 3 comes back")
}

#[test]
fn text_shows_clients_operations_and_times() {
    let text = picture::text(&resurrection());
    assert_eq!(text, EXPECTED);
}

const EXPECTED: &str = "\
key 0 is not linearizable: 'get' of client 2 returned 'absent', expected 3 (6 of 9 operations shown)
  client 0    510 to  900 ns  put 2 -> done             |---|
  client 1    700 to    ? ns  put 3 -> ?                  |----------------------->
  client 2   1000 to 1020 ns  put 4 if v7 -> unknown          |--|
  client 0   1200 to 1450 ns  delete -> done                       |--|
  client 2   1500 to 1620 ns  get -> 3                                  |--|
! client 2   1700 to 1850 ns  get -> absent                                  |--|
";

#[test]
fn svg_is_well_formed_and_complete() {
    let violation = resurrection();
    let svg = picture::svg(&violation);
    assert_eq!(picture::svg(&violation), svg, "the same bytes");
    let texts = xml::texts(&svg).unwrap_or_else(|fault| panic!("{fault}"));
    for operation in &violation.operations {
        assert!(texts.iter().any(|text| text.starts_with(&format!("{} -> ", operation.ask))), "{operation}");
    }
    assert_eq!(svg.matches("offender\" x=").count(), 1);
    assert!(svg.contains("prefers-color-scheme: dark") && !svg.contains("href"), "self-contained");
}

#[test]
fn malformed_xml_is_detected() {
    for text in [
        "<a>",
        "<a></b>",
        "<a b=c/>",
        "<a b=\"<\"/>",
        "<a>x < y</a>",
        "<a>&nbsp;</a>",
        "<a/><b/>",
        "a",
        "<a b=\"1\" b=\"2\"/>",
    ] {
        assert!(xml::texts(text).is_err(), "{text}");
    }
    assert_eq!(xml::texts("<a b=\"c\"><d>1 &lt; 2</d><e/></a>").unwrap(), ["1 < 2"]);
}

/// A parser of the subset of XML that the drawings use.
mod xml {
    /// Returns the texts between tags, or an error if the document is not well-formed.
    pub(super) fn texts(mut rest: &str) -> Result<Vec<String>, String> {
        let (mut open, mut texts, mut roots) = (Vec::new(), Vec::new(), 0);
        while let Some(at) = rest.find('<') {
            let (text, from) = rest.split_at(at);
            let text = unescaped(text)?;
            if !text.trim().is_empty() {
                if open.is_empty() {
                    return Err(format!("text outside: {text}"));
                }
                texts.push(text);
            }
            let end = from.find('>').ok_or("a tag without an end")?;
            let tag = &from[1..end];
            rest = &from[end + 1..];
            if let Some(name) = tag.strip_prefix('/') {
                if open.pop() != Some(name) {
                    return Err(format!("</{name}> closes another"));
                }
                continue;
            }
            let (tag, is_empty) = tag.strip_suffix('/').map_or((tag, false), |tag| (tag, true));
            let (name, list) = tag.split_once(' ').unwrap_or((tag, ""));
            attributes(list)?;
            roots += u32::from(open.is_empty());
            if !is_empty {
                open.push(name);
            }
        }
        if !rest.trim().is_empty() || !open.is_empty() || roots != 1 {
            return Err(format!("{roots} roots, {open:?} open, then '{rest}'"));
        }
        Ok(texts)
    }

    fn attributes(mut rest: &str) -> Result<(), String> {
        let mut names = Vec::new();
        while !rest.trim().is_empty() {
            let (name, after) = rest.trim_start().split_once("=\"").ok_or(format!("no quotes in {rest}"))?;
            let (value, after) = after.split_once('"').ok_or(format!("no end of {name}"))?;
            if names.contains(&name) || name.contains(char::is_whitespace) {
                return Err(format!("the attribute {name}"));
            }
            unescaped(value)?;
            names.push(name);
            rest = after;
        }
        Ok(())
    }

    fn unescaped(text: &str) -> Result<String, String> {
        let mut plain = text.to_owned();
        for (entity, letter) in [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\"")] {
            plain = plain.replace(entity, letter);
        }
        let rest = text.replace("&lt;", "").replace("&gt;", "").replace("&quot;", "").replace("&amp;", "");
        if rest.contains(['&', '<', '>']) {
            return Err(format!("'{rest}' is not escaped"));
        }
        Ok(plain.replace("&amp;", "&"))
    }
}
