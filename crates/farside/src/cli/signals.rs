//! Signals on which a command ends in an orderly way.

use rustix::process::Signal;
use std::ffi::c_int;

/// The signals that ask a process to end: SIGTERM, SIGINT, SIGHUP and SIGQUIT.
///
/// SIGHUP and SIGQUIT are left out if the process ignores them: `nohup` and shells set that for background processes.
pub(super) fn ending() -> Vec<c_int> {
    let ignored = ignored();
    let is_handled = |signal: &Signal| ignored & (1 << (signal.as_raw() - 1)) == 0;
    let wanted = [Signal::HUP, Signal::QUIT].into_iter().filter(is_handled);
    [Signal::TERM, Signal::INT].into_iter().chain(wanted).map(Signal::as_raw).collect()
}

/// Ends this process by the default action of a signal, as if the signal were not handled.
pub(super) fn end_by(signal: c_int) -> ! {
    // Returns only if the system refuses. The exit code is then the one that a shell reports for the signal.
    let _ended = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal);
}

/// Bit mask of the signals that this process ignores.
fn ignored() -> u64 {
    // If the system does not report the mask, no signal counts as ignored. The command then ends in good order on a
    // signal that it should ignore, which is better than the reverse.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
