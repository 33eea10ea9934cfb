//! Determines the signals on which a command cleans up and ends.

use rustix::process::Signal;
use std::ffi::c_int;

/// Returns the signals that ask a process to end: SIGTERM, SIGINT, SIGHUP and SIGQUIT.
///
/// SIGHUP and SIGQUIT are omitted if this process ignores them, as `nohup` and shells arrange for background processes.
pub(super) fn ending() -> Vec<c_int> {
    let ignored = ignored();
    let is_handled = |signal: &Signal| ignored & (1 << (signal.as_raw() - 1)) == 0;
    let wanted = [Signal::HUP, Signal::QUIT].into_iter().filter(is_handled);
    [Signal::TERM, Signal::INT].into_iter().chain(wanted).map(Signal::as_raw).collect()
}

/// Ends this process by the default action of a signal, as if the signal were not handled.
pub(super) fn end_by(signal: c_int) -> ! {
    // The call returns only if the system refuses. The exit code is then the one that a shell reports for the signal.
    let _ended = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal);
}

/// Returns the bit mask of the signals that this process ignores. Bit 0 is signal 1.
fn ignored() -> u64 {
    // If the system does not report the mask, no signal counts as ignored. The command then cleans up and ends even on
    // a signal that it should ignore. That is better than to ignore a signal that should end it.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
