//! A terminal that is left as it was found, whichever signal ends this process.

use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use std::ffi::c_int;
use std::io::{self, Write};

/// From now on, each of these signals puts the terminal back as it is now, writes `leave` to it, and then ends this
/// process as it would have without.
pub(super) fn left_as_found(signals: impl IntoIterator<Item = c_int>, leave: &'static str) -> io::Result<()> {
    let found = tcgetattr(io::stdin())?;
    let mut signals = signal_hook::iterator::Signals::new(signals)?;
    std::thread::Builder::new().name("farside-terminal".into()).spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        // Where the terminal has gone, nothing is to be put back.
        let _gone = tcsetattr(io::stdin(), OptionalActions::Now, &found);
        let mut out = io::stdout();
        let _gone = out.write_all(leave.as_bytes()).and_then(|()| out.flush());
        super::signals::end_by(signal);
    })?;
    Ok(())
}
