//! `heal`: completes what dead clients left unfinished, and repairs stores, once or again and again.
//!
//! Invariant: `serve --heal` runs the same code.

use super::{Done, Failure, Target, duration};
use farside::Pool;
use farside::heal::{Action, Healed};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// Complete creations and drops of stores that dead clients left unfinished, and repair stores
///
/// The command runs as a client of all nodes. It may be ended at any point, and several may run at the same time.
#[derive(clap::Args)]
pub(super) struct Heal {
    #[command(flatten)]
    target: Target,
    /// Heal this store only [default: all stores]
    #[arg(long, value_name = "NAME")]
    store: Option<String>,
    /// Heal again and again, at this interval, and print only what is new
    #[arg(long, value_name = "INTERVAL", num_args = 0..=1, default_missing_value = "10s", value_parser = interval)]
    watch: Option<Duration>,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

impl Heal {
    pub(super) fn run(self) -> Done {
        let pool = self.target.connect()?;
        let only = self.store.as_deref();
        let show = |line: &Line| {
            match self.json {
                true => print_line!("{}", line.object),
                false => print_line!("{}", line.text),
            }
            Ok(())
        };
        let mut rounds = Rounds::default();
        let Some(every) = self.watch else {
            let seen = rounds.next(&pool, only, show)?;
            let problems = rounds.problems;
            if problems > 0 {
                return Err(Failure::Error(format!(
                    "{problems} problems remain: the reasons are above; remove the causes, then heal again"
                )));
            }
            if rounds.before.is_empty() && !self.json {
                print_line!(
                    "nothing to heal in {} at {}",
                    counted(seen, "store"),
                    counted(pool.nodes().len(), "node")
                );
            }
            return Ok(());
        };
        loop {
            match rounds.next(&pool, only, show) {
                Err(Failure::Error(reason)) => rounds.fail(&reason, |reason| note!("farside: {reason}")),
                outcome => drop(outcome?),
            }
            std::thread::sleep(every);
        }
    }
}

/// Parses, for clap, the interval between two rounds.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let within = Duration::from_millis(100)..=Duration::from_secs(86400);
    duration(text).ok().filter(|every| within.contains(every)).ok_or_else(|| {
        format!(
            "'{text}' is not an interval between two rounds: give 100ms to 24h; a number alone is seconds"
        )
    })
}

/// A line of the report.
pub(super) struct Line {
    pub(super) text: String,
    pub(super) object: Value,
    /// Whether something was left as it is.
    pub(super) is_problem: bool,
}

/// Rounds of healing. A round shows only lines that the round before did not have.
#[derive(Default)]
pub(super) struct Rounds {
    before: BTreeSet<String>,
    /// Number of problems of the last round.
    problems: usize,
}

impl Rounds {
    /// Heals once, and passes each line of the report to `show`. Returns the number of stores.
    ///
    /// # Errors
    /// Those of `show`; or no node has answered, or there is no store called `only`.
    pub(super) fn next(
        &mut self,
        pool: &Pool,
        only: Option<&str>,
        mut show: impl FnMut(&Line) -> Done,
    ) -> Result<usize, Failure> {
        let mut now = BTreeSet::new();
        let (mut problems, mut shown) = (0, Ok(()));
        let mut add = |line: Line| {
            // Several members of a store may have the same problem.
            if now.contains(&line.text) {
                return;
            }
            problems += usize::from(line.is_problem);
            if shown.is_ok() && !self.before.contains(&line.text) {
                shown = show(&line);
            }
            now.insert(line.text);
        };
        let seen = pool.heal(only, |healed| add(about(&healed)))?;
        for (node, error) in &seen.silent {
            let node = node.0 as usize;
            let url = pool.nodes().nth(node).map_or_else(String::new, |node| node.url().to_owned());
            add(Line {
                text: format!("node {node} at {url}: not healed: {error}"),
                object: json!({ "node": node, "url": url, "action": "left", "error": error.to_string() }),
                is_problem: true,
            });
        }
        (self.before, self.problems) = (now, problems);
        shown.map(|()| seen.stores as usize)
    }

    /// Passes the reason of a failed round to `show`, unless the round before failed for the same reason.
    pub(super) fn fail(&mut self, reason: &str, show: impl FnOnce(&str)) {
        let now = BTreeSet::from([reason.to_owned()]);
        if self.before != now {
            show(reason);
        }
        self.before = now;
    }
}

fn about(healed: &Healed) -> Line {
    let mut object = json!({ "store": healed.store, "action": healed.action.name() });
    if let Some((held, members)) = healed.action.members() {
        object["held"] = held.into();
        object["members"] = members.into();
    }
    match &healed.action {
        Action::Repaired(what) => object["repair"] = what.as_str().into(),
        Action::Left(error) => object["error"] = error.to_string().into(),
        _ => {}
    }
    Line { text: healed.to_string(), object, is_problem: matches!(healed.action, Action::Left(_)) }
}

fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}
