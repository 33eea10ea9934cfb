//! The result of a check, and its output: one or two lines for people, or one JSON object a line for scripts.
//!
//! Invariant: a check's id never changes its meaning, because scripts depend on it.

use serde::Serialize;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// The finding is as it should be.
    Ok,
    /// The finding is worth knowing, or nothing is known on this machine.
    Note,
    /// Farside works, but more slowly or less reliably than it could.
    Warn,
    /// A feature of this release does not work on this machine.
    Fail,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Check {
    pub(super) id: &'static str,
    pub(super) verdict: Verdict,
    /// Name of the checked property, for people.
    pub(super) what: &'static str,
    /// Finding of the check, for people.
    pub(super) found: String,
    /// Reason why the finding matters, in half a sentence.
    pub(super) why: Option<&'static str>,
    /// Remedy: a command to run, or an advice.
    pub(super) remedy: Option<String>,
    /// Median latency of a get in microseconds, if the check measured it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) p50_us: Option<f64>,
}

/// Text for a finding about which the system provides no information.
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

    /// Returns the result of a check for which the system provides no information, as in many containers.
    pub(super) fn unknown(id: &'static str, what: &'static str) -> Check {
        Check::note(id, what, UNKNOWN)
    }

    pub(super) fn because(self, why: &'static str) -> Check {
        Check { why: Some(why), ..self }
    }

    pub(super) fn remedy(self, remedy: impl Into<String>) -> Check {
        Check { remedy: Some(remedy.into()), ..self }
    }

    /// Formats the result for people. The remedy is on a line of its own, so that it can be copied.
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

/// Replaces control characters by blanks: text from the system or a peer must not control the terminal.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_coloured_only_on_request() {
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
    fn every_object_has_the_same_fields() {
        let reported = serde_json::to_value(Check::unknown("a.b", "a thing")).expect("plain data");
        let fields: Vec<&String> = reported.as_object().expect("an object").keys().collect();
        assert_eq!(fields, ["found", "id", "remedy", "verdict", "what", "why"]);
        assert_eq!((&reported["verdict"], &reported["found"]), (&"note".into(), &"not known here".into()));
    }
}
