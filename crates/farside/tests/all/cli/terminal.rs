//! A command at a terminal of its own: what it shows there, and what is typed to it.

use crate::support::until;
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

/// A terminal with a command at it, which is killed when the test ends.
pub(crate) struct Terminal {
    child: Child,
    keyboard: File,
    /// The command's end, so that what it leaves there can be looked at.
    end: OwnedFd,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Terminal {
    pub(crate) fn start(mut command: Command) -> Terminal {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("the system has terminals");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("it is ours");
        tcsetwinsize(&master, Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 })
            .expect("a size");
        let name = ptsname(&master, Vec::new()).expect("a name");
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let end = rustix::fs::open(&name, flags, Mode::empty()).expect("the other end");
        let clone = || end.try_clone().expect("a descriptor");
        command.env("TERM", "xterm").stdin(clone()).stdout(clone()).stderr(clone());
        let child = command.spawn().expect("it can be started");
        let keyboard = File::from(master);
        let mut screen = keyboard.try_clone().expect("a descriptor");
        let shown = Arc::<Mutex<Vec<u8>>>::default();
        let theirs = Arc::clone(&shown);
        // Ends with the terminal.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                theirs.lock().expect("nobody panics here").extend_from_slice(&bytes[..count]);
            }
        });
        Terminal { child, keyboard, end, shown }
    }

    pub(crate) fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).expect("somebody is there");
    }

    /// What was shown so far, as it came.
    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("nobody panics there")).into_owned()
    }

    /// Waits until that is shown which was not before; everything that was shown until then counts as before.
    #[track_caller]
    pub(crate) fn shows(&self, text: &str) {
        let since = std::time::Instant::now();
        until(&format!("'{text}' is shown"), || {
            if since.elapsed() > crate::support::PATIENCE / 3 {
                panic!("'{text}' is still not shown, but {:?}", self.shown());
            }
            let mut shown = self.shown.lock().expect("nobody panics there");
            let at = shown.windows(text.len()).position(|window| window == text.as_bytes());
            at.is_some_and(|at| {
                shown.drain(..at + text.len());
                true
            })
        });
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it is there");
    }

    /// Waits for its end: its exit code, or what 128 and its signal make.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> i32 {
        use std::os::unix::process::ExitStatusExt;
        let mut code = None;
        until("the command has ended", || {
            let status = self.child.try_wait().expect("ours to wait for");
            code = status.map(|status| status.code().unwrap_or(128 + status.signal().unwrap_or(0)));
            code.is_some()
        });
        code.expect("it has ended")
    }

    /// Whether lines are edited and echoed by the terminal itself, as a shell expects to find it.
    pub(crate) fn is_as_found(&self) -> bool {
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
