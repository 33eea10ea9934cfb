//! Shows full-screen views in a terminal. Restores the terminal when a view ends, on a panic, and on a signal.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{
    LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize, tcsetattr,
};
use std::ffi::c_int;
use std::io::{self, Write};
use std::time::Instant;

/// Saves the terminal's modes. When one of `signals` arrives, restores the modes, writes `leave` to the terminal, and
/// ends this process by that signal.
pub(super) fn restore_on(signals: impl IntoIterator<Item = c_int>, leave: &'static str) -> io::Result<()> {
    let found = tcgetattr(io::stdin())?;
    let mut signals = signal_hook::iterator::Signals::new(signals)?;
    std::thread::Builder::new().name("farside-terminal".into()).spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        // Errors are ignored: if the terminal is gone, there is nothing to restore.
        let _gone = tcsetattr(io::stdin(), OptionalActions::Now, &found);
        let mut out = io::stdout();
        let _gone = out.write_all(leave.as_bytes()).and_then(|()| out.flush());
        super::signals::end_by(signal);
    })?;
    Ok(())
}

/// A view that covers the whole terminal. The terminal is restored when the view is dropped, on a panic, and on a
/// signal that ends this process.
pub(super) struct Screen {
    found: Termios,
}

/// Escape sequences that switch to the alternate screen and hide the cursor. `LEAVE` reverts both.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";

impl Screen {
    pub(super) fn enter() -> io::Result<Screen> {
        restore_on(super::signals::ending(), LEAVE)?;
        let found = tcgetattr(io::stdin())?;
        let default = std::panic::take_hook();
        let as_found = found.clone();
        std::panic::set_hook(Box::new(move |panic| {
            leave(&as_found);
            default(panic);
        }));
        let mut keys = found.clone();
        keys.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        // Ctrl-Z is disabled: a stopped process would leave the terminal in these modes.
        keys.special_codes[SpecialCodeIndex::VSUSP] = 0;
        keys.special_codes[SpecialCodeIndex::VMIN] = 1;
        keys.special_codes[SpecialCodeIndex::VTIME] = 0;
        let screen = Screen { found };
        tcsetattr(io::stdin(), OptionalActions::Now, &keys)?;
        write(ENTER)?;
        Ok(screen)
    }

    /// Returns the number of columns and rows, or 80 and 24 if they are unknown.
    pub(super) fn size() -> (usize, usize) {
        let size = tcgetwinsize(io::stdout()).ok().filter(|size| size.ws_col > 0 && size.ws_row > 0);
        size.map_or((80, 24), |size| (size.ws_col.into(), size.ws_row.into()))
    }

    /// Replaces the content of the screen by `lines`. Cuts off lines and columns that do not fit.
    pub(super) fn show(lines: &[String]) -> io::Result<()> {
        let (columns, rows) = Screen::size();
        let mut text = String::from("\x1b[H");
        for (index, line) in lines.iter().take(rows).enumerate() {
            text.push_str(if index == 0 { "" } else { "\r\n" });
            text.extend(line.chars().take(columns));
            text.push_str("\x1b[K");
        }
        write(&(text + "\x1b[J"))
    }

    /// Waits at most until `end` for a key that ends the view. Returns whether such a key was typed.
    pub(super) fn is_ended_before(end: Instant) -> io::Result<bool> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).expect("an interval is at most an hour");
            let input = io::stdin();
            let mut polled = [PollFd::new(&input, PollFlags::IN)];
            match poll(&mut polled, Some(&timeout)) {
                Ok(0) => return Ok(false),
                Ok(_) => {
                    let mut key = [0; 64];
                    let count = rustix::io::read(&input, &mut key)?;
                    // A read of 0 bytes means that the terminal is gone; 4 is Ctrl-D.
                    if count == 0 || key[..count].iter().any(|key| matches!(key, b'q' | b'Q' | 4)) {
                        return Ok(true);
                    }
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            leave(&self.found);
        }
    }
}

fn leave(found: &Termios) {
    // Errors are ignored: if the terminal is gone, there is nothing to restore.
    let _gone = tcsetattr(io::stdin(), OptionalActions::Now, found);
    let _gone = write(LEAVE);
}

fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
