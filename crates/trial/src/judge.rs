//! The verdict on a trial: what is wrong, in as few operations as show it, and the command that replays it.
//!
//! Invariant: what nobody knows is never called good. Invariant: a panic within a trial is a finding of that trial, and
//! ends nothing else.

use crate::{Report, Setup, Window, events};
use farside_sim::fault::Fault;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::fmt::{self, Write};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::Once;

/// What is known of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The history is one that its family allows, and nothing else was wrong.
    Good,
    /// Nothing else was wrong; of the history nobody has asked.
    NotChecked,
    /// Of a part of the history nobody knows, and nothing is known to be wrong.
    Undecided,
    /// Something is wrong.
    Violated,
}

impl Verdict {
    /// As reports name it.
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Good => "good",
            Verdict::NotChecked => "not checked",
            Verdict::Undecided => "undecided",
            Verdict::Violated => "violated",
        }
    }
}

/// A trial and the verdict on it. Displayed, it is what people need to know of one that is not good.
pub struct Judged {
    /// What was tried.
    pub setup: Setup,
    /// By which seed.
    pub seed: u64,
    /// What came of it; nothing if it has panicked.
    pub report: Option<Report>,
    /// What is known of it.
    pub verdict: Verdict,
    /// What is wrong, and what nobody knows.
    pub reasons: Vec<String>,
    /// The operations that show what is wrong with the history, if that is.
    pub window: Option<Window>,
}

/// Runs a trial and judges it: always by what it says of itself, and by its history if `check`.
pub fn judge(setup: &Setup, seed: u64, check: bool) -> Judged {
    judge_recorded(setup, seed, check, None)
}

/// As [`judge`]; the events of its network go to `events`.
pub fn judge_recorded(setup: &Setup, seed: u64, check: bool, events: Option<events::Lines>) -> Judged {
    let mut judged = Judged {
        setup: setup.clone(),
        seed,
        report: None,
        verdict: if check { Verdict::Good } else { Verdict::NotChecked },
        reasons: Vec::new(),
        window: None,
    };
    let report = match caught(|| crate::run(setup, seed, events)) {
        Ok(report) => report,
        Err(panic) => {
            judged.blame(format!("an assertion of ours failed: {panic}"));
            return judged;
        }
    };
    if let Some(violation) = &report.violation {
        judged.blame(violation.clone());
    }
    if check {
        judged.check(&report);
    }
    judged.report = Some(report);
    judged
}

impl Judged {
    /// Whether something is wrong, or nobody knows.
    pub fn is_bad(&self) -> bool {
        matches!(self.verdict, Verdict::Undecided | Verdict::Violated)
    }

    fn check(&mut self, report: &Report) {
        let checked = report.record.check();
        if !checked.undecided.is_empty() && self.verdict == Verdict::Good {
            self.verdict = Verdict::Undecided;
        }
        self.reasons.extend(checked.undecided);
        checked.violated.into_iter().for_each(|reason| self.blame(reason));
        self.window = checked.window;
    }

    fn blame(&mut self, reason: String) {
        self.verdict = Verdict::Violated;
        self.reasons.push(reason);
    }
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} is {}", named(&self.setup, self.seed), self.verdict.name())?;
        for reason in &self.reasons {
            writeln!(f, "  {reason}")?;
        }
        if let Some(window) = &self.window {
            f.write_str(&window.text)?;
        }
        write!(f, "  replay: {}", replay(&self.setup, self.seed))
    }
}

fn named(setup: &Setup, seed: u64) -> String {
    format!("seed {seed} of {}", setup.system.name())
}

/// The command that runs this trial again.
pub fn replay(setup: &Setup, seed: u64) -> String {
    let mut command = format!("farside sim --system {}", setup.system.name());
    let mut add = |flag: &str, value: Option<String>| {
        if let Some(value) = value {
            write!(command, " --{flag} {value}").expect("a String takes everything");
        }
    };
    add("nodes", setup.nodes.map(|nodes| nodes.to_string()));
    add("carrier", setup.carrier.map(|carrier| carrier.name().to_owned()));
    add("clients", setup.clients.map(|clients| clients.to_string()));
    add("keys", setup.keys.map(|keys| keys.to_string()));
    add("operations", setup.operations.map(|operations| operations.to_string()));
    add("faults", (setup.faults != Fault::ALL).then(|| names(&setup.faults)));
    for mutant in setup.system.mutants().into_iter().filter(|mutant| mutant.is_on()) {
        add("mutant", Some(format!("{mutant:?}")));
    }
    add("seed", Some(seed.to_string()));
    command
}

/// Faults as a flag lists them.
fn names(faults: &[Fault]) -> String {
    match faults {
        [] => "none".to_owned(),
        faults => faults.iter().map(|fault| fault.name()).collect::<Vec<_>>().join(","),
    }
}

thread_local! {
    /// Whether this thread's panics are findings.
    static IS_CATCHING: Cell<bool> = const { Cell::new(false) };
    /// The first of them, for those that come while it unwinds follow from it.
    static CAUGHT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Returns what a function returns. If it panics, returns where and why, and prints nothing.
///
/// # Errors
/// It panicked.
pub fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |panic| if IS_CATCHING.get() { keep(panic) } else { others(panic) }));
    });
    CAUGHT.take();
    IS_CATCHING.set(true);
    // What the trial has left half-done is its own, and nobody looks at it again.
    let done = panic::catch_unwind(AssertUnwindSafe(run));
    IS_CATCHING.set(false);
    done.map_err(|_| CAUGHT.take().expect("the hook has heard of it"))
}

fn keep(panic: &PanicHookInfo<'_>) {
    let payload = panic.payload();
    let said = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref().map(String::as_str));
    let said = said.unwrap_or("a panic without words");
    let mut text = panic.location().map_or_else(|| said.to_owned(), |at| format!("{said} ({at})"));
    let backtrace = Backtrace::capture(); // With RUST_BACKTRACE alone.
    if backtrace.status() == BacktraceStatus::Captured {
        write!(text, "\n{backtrace}").expect("a String takes everything");
    }
    CAUGHT.with_borrow_mut(|caught| _ = caught.get_or_insert(text));
}
