//! Runs a command at a pseudo-terminal, into which a test types keys and from which it reads the output.

use crate::support::until;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

/// A pseudo-terminal with a command, which is killed when the terminal is dropped.
pub(crate) struct Terminal {
    child: Child,
    keyboard: File,
    /// The command's end of the terminal. Tests read there the modes that the command leaves.
    end: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    pub(crate) fn start(mut command: Command) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("the system has terminals");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("a new terminal");
        tcsetwinsize(&master, Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 })
            .expect("a size");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let end = rustix::fs::open(&name, flags, Mode::empty()).expect("the other end");
        let clone = || end.try_clone().expect("a descriptor");
        command.env("TERM", "xterm").stdin(clone()).stdout(clone()).stderr(clone());
        let child = command.spawn().expect("the command starts");
        let keyboard = File::from(master);
        let mut screen = keyboard.try_clone().expect("a descriptor");
        let shown = Arc::<Mutex<Vec<u8>>>::default();
        let theirs = Arc::clone(&shown);
        // The thread exits when the terminal is closed.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                theirs.lock().expect("not poisoned").extend_from_slice(&bytes[..count]);
            }
        });
        Terminal { child, keyboard, end, shown }
    }

    pub(crate) fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("the terminal is open");
    }

    /// Returns the output after the text that [`Terminal::shows`] found last.
    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("not poisoned")).into_owned()
    }

    /// Waits until `text` is shown, and discards the output up to its end.
    #[track_caller]
    pub(crate) fn shows(&self, text: &str) {
        let since = std::time::Instant::now();
        until(&format!("'{text}' is shown"), || {
            if since.elapsed() > crate::support::PATIENCE / 3 {
                panic!("'{text}' is still not shown, only {:?}", self.shown());
            }
            let mut shown = self.shown.lock().expect("not poisoned");
            let at = shown.windows(text.len()).position(|window| window == text.as_bytes());
            at.is_some_and(|at| {
                shown.drain(..at + text.len());
                true
            })
        });
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("the command runs");
    }

    /// Waits for the command to exit. Returns its exit code, or 128 + the number of the signal that ended it.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let mut code = None;
        until("the command has ended", || {
            let status = self.child.try_wait().expect("a child process");
            code = status.map(|status| status.code().unwrap_or(128 + status.signal().unwrap_or(0)));
            code.is_some()
        });
        code.expect("it has ended")
    }

    /// Whether the terminal itself edits and echoes lines, as a shell expects after a command.
    pub(crate) fn is_restored(&self) -> bool {
        let modes = tcgetattr(&self.end).expect("a terminal").local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _gone_already = self.child.kill();
        let _reaped_already = self.child.wait();
        if !std::thread::panicking() {
            assert!(!self.shown().contains("panicked"), "{}", self.shown());
        }
    }
}
