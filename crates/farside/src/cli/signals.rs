//! Which signals end a command in good order.

use rustix::process::Signal;
use std::ffi::c_int;

/// The signals that ask a process to end. SIGHUP and SIGQUIT are left alone where they are ignored, as `nohup` and
/// shells have it for what is to go on without them.
pub(super) fn ending() -> Vec<c_int> {
    let ignored = ignored();
    let asks = |signal: &Signal| ignored & (1 << (signal.as_raw() - 1)) == 0;
    let wanted = [Signal::HUP, Signal::QUIT].into_iter().filter(asks);
    [Signal::TERM, Signal::INT].into_iter().chain(wanted).map(Signal::as_raw).collect()
}

/// Ends this process by a signal, as if nobody had waited for that.
pub(super) fn end_by(signal: c_int) -> ! {
    // It does not come back, unless the system refuses; then the exit code says as much.
    let _ended = signal_hook::low_level::emulate_default_handler(signal);
    std::process::exit(128 + signal);
}

/// A bit for every signal that this process was started to ignore.
fn ignored() -> u64 {
    // Where the system does not tell, none counts as ignored: to end in good order once too often is the lesser harm.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
