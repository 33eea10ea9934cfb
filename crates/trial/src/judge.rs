//! The verdict on a trial: its violations, the fewest operations that show them, and the command that replays the
//! trial.
//!
//! Invariant: an undecided history is never called good.
//!
//! Invariant: a panic within a trial is a finding of that trial, and does not affect other trials.

use crate::{Report, Setup, Window, events};
use farside_sim::fault::Fault;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::cell::{Cell, RefCell};
use std::fmt::{self, Write};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::Once;

/// Verdict on a trial. It follows from the violations that the trial found and from the check of its history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The family's specification allows the history, and no other violation was found.
    Good,
    /// No other violation was found; the history was not checked.
    NotChecked,
    /// A part of the history could not be decided, and no violation was found.
    Undecided,
    /// A violation was found.
    Violated,
}

impl Verdict {
    /// Name of the verdict in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Verdict::Good => "good",
            Verdict::NotChecked => "not checked",
            Verdict::Undecided => "undecided",
            Verdict::Violated => "violated",
        }
    }
}

/// A trial and the verdict on it. `Display` prints the report of a bad trial.
pub struct Judged {
    /// Configuration of the trial.
    pub setup: Setup,
    /// Seed of the trial.
    pub seed: u64,
    /// Outcome of the trial, or `None` if it panicked.
    pub report: Option<Report>,
    /// The verdict on the trial.
    pub verdict: Verdict,
    /// The violations, and the reasons why parts of the history could not be decided.
    pub reasons: Vec<String>,
    /// The operations that show the history's violation, if any.
    pub window: Option<Window>,
}

/// Runs a trial and judges it by the violations that the trial itself found. If `check`, also checks its history.
pub fn judge(setup: &Setup, seed: u64, check: bool) -> Judged {
    judge_recorded(setup, seed, check, None)
}

/// Judges a trial as [`judge`] does, and passes the network's events to `events`.
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
            judged.blame(format!("an assertion failed: {panic}"));
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
    /// Whether the verdict is violated or undecided.
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

/// Returns the command that replays this trial.
pub fn replay(setup: &Setup, seed: u64) -> String {
    let mut command = format!("farside sim --system {}", setup.system.name());
    let mut add = |flag: &str, value: Option<String>| {
        if let Some(value) = value {
            write!(command, " --{flag} {value}").expect("writing to a String cannot fail");
        }
    };
    add("nodes", setup.nodes.map(|nodes| nodes.to_string()));
    add("carrier", setup.carrier.map(|carrier| carrier.name().to_owned()));
    add("clients", setup.clients.map(|clients| clients.to_string()));
    add("keys", setup.keys.map(|keys| keys.to_string()));
    add("operations", setup.operations.map(|operations| operations.to_string()));
    add("scheme", setup.scheme.map(|scheme| scheme.name().to_owned()));
    add("faults", (setup.faults != Fault::ALL).then(|| names(&setup.faults)));
    for mutant in setup.system.mutants().into_iter().filter(|mutant| mutant.is_on()) {
        add("mutant", Some(format!("{mutant:?}")));
    }
    add("seed", Some(seed.to_string()));
    command
}

/// Formats faults as the value of `--faults`.
fn names(faults: &[Fault]) -> String {
    match faults {
        [] => "none".to_owned(),
        faults => faults.iter().map(|fault| fault.name()).collect::<Vec<_>>().join(","),
    }
}

thread_local! {
    /// Whether this thread's panics are caught as findings.
    static IS_CATCHING: Cell<bool> = const { Cell::new(false) };
    /// The first panic that was caught. Panics during unwinding are not kept, because the first panic causes them.
    static CAUGHT: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Returns the result of `run`. If `run` panics, this function prints nothing, and returns the panic's message and
/// location as the error.
///
/// # Errors
/// `run` panicked.
pub fn caught<T>(run: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let others = panic::take_hook();
        panic::set_hook(Box::new(move |panic| if IS_CATCHING.get() { keep(panic) } else { others(panic) }));
    });
    CAUGHT.take();
    IS_CATCHING.set(true);
    // Unwind safety: only the trial uses the state that it may leave half-modified.
    let done = panic::catch_unwind(AssertUnwindSafe(run));
    IS_CATCHING.set(false);
    done.map_err(|_| CAUGHT.take().expect("the hook has kept the message"))
}

fn keep(panic: &PanicHookInfo<'_>) {
    let payload = panic.payload();
    let said = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref().map(String::as_str));
    let said = said.unwrap_or("a panic without a message");
    let mut text = panic.location().map_or_else(|| said.to_owned(), |at| format!("{said} ({at})"));
    let backtrace = Backtrace::capture(); // Only if RUST_BACKTRACE is set.
    if backtrace.status() == BacktraceStatus::Captured {
        write!(text, "\n{backtrace}").expect("writing to a String cannot fail");
    }
    CAUGHT.with_borrow_mut(|caught| _ = caught.get_or_insert(text));
}
