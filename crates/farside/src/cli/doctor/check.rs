//! What one check has found, and how it is told: to people as a line or three, to scripts as an object a line.
//!
//! Invariant: a check's id never changes its meaning, for scripts go by it.

use serde::Serialize;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// As it should be.
    Ok,
    /// Worth knowing, or not known here.
    Note,
    /// It works, and slower or less surely than it could.
    Warn,
    /// Something that this release has does not work here.
    Fail,
}

/// What was looked at, and what was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Check {
    pub(super) id: &'static str,
    pub(super) verdict: Verdict,
    /// What was looked at, for people.
    pub(super) what: &'static str,
    pub(super) found: String,
    /// Why it matters, in half a sentence.
    pub(super) why: Option<&'static str>,
    /// A command to type, or what else to do.
    pub(super) remedy: Option<String>,
    /// The median time of a get, in microseconds, where one was tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) p50_us: Option<f64>,
}

/// What is found where the system does not tell.
const UNKNOWN: &str = "not known here";

impl Check {
    pub(super) fn ok(id: &'static str, what: &'static str, found: impl Into<String>) -> Check {
        let (verdict, found) = (Verdict::Ok, found.into());
        Check { id, verdict, what, found, why: None, remedy: None, p50_us: None }
    }

    pub(super) fn note(id: &'static str, what: &'static str, found: impl Into<String>) -> Check {
        Check { verdict: Verdict::Note, ..Check::ok(id, what, found) }
    }

    pub(super) fn warn(id: &'static str, what: &'static str, found: impl Into<String>) -> Check {
        Check { verdict: Verdict::Warn, ..Check::ok(id, what, found) }
    }

    pub(super) fn fail(id: &'static str, what: &'static str, found: impl Into<String>) -> Check {
        Check { verdict: Verdict::Fail, ..Check::ok(id, what, found) }
    }

    /// The system does not tell, as in many containers.
    pub(super) fn unknown(id: &'static str, what: &'static str) -> Check {
        Check::note(id, what, UNKNOWN)
    }

    pub(super) fn because(self, why: &'static str) -> Check {
        Check { why: Some(why), ..self }
    }

    pub(super) fn remedy(self, remedy: impl Into<String>) -> Check {
        Check { remedy: Some(remedy.into()), ..self }
    }

    /// For people. A remedy has a line of its own, to be copied whole.
    pub(super) fn text(&self, colour: bool) -> String {
        let (name, paint) = match self.verdict {
            Verdict::Ok => ("ok", "32"),
            Verdict::Note => ("note", "36"),
            Verdict::Warn => ("warn", "33"),
            Verdict::Fail => ("fail", "1;31"),
        };
        let verdict = match colour {
            true => format!("\x1b[{paint}m{name:<4}\x1b[0m"),
            false => format!("{name:<4}"),
        };
        let found = one_line(&self.found);
        let why = self.why.map_or_else(String::new, |why| format!("; {why}"));
        let remedy = self.remedy.as_deref().map(one_line);
        let remedy = remedy.map_or_else(String::new, |remedy| format!("\n{:<25}-> {remedy}", ""));
        format!("  {verdict} {:<18}{found}{why}{remedy}", self.what)
    }
}

/// What the system or a peer has written may hold anything: nothing of it moves a terminal's cursor.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_are_told_in_lines_and_coloured_only_if_they_want_it() {
        let check =
            Check::warn("a.b", "a thing", "half\x1b[2J\nof it").because("it is slow").remedy("do this");
        let indent = " ".repeat(25);
        assert_eq!(
            check.text(false),
            format!("  warn a thing           half [2J of it; it is slow\n{indent}-> do this")
        );
        assert!(check.text(true).starts_with("  \x1b[33mwarn\x1b[0m a thing"));
        assert_eq!(Check::ok("a", "b", "c").text(false), "  ok   b                 c");
    }

    #[test]
    fn scripts_are_told_an_object_with_the_same_fields_each_time() {
        let told = serde_json::to_value(Check::unknown("a.b", "a thing")).expect("plain data");
        let fields: Vec<&String> = told.as_object().expect("an object").keys().collect();
        assert_eq!(fields, ["found", "id", "remedy", "verdict", "what", "why"]);
        assert_eq!((&told["verdict"], &told["found"]), (&"note".into(), &"not known here".into()));
    }
}
