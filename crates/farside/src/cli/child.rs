//! Servers that a command starts and ends: nodes of its own, rivals.
//!
//! Invariant: a server is in a process group of its own, so that a terminal's Ctrl-C is this command's alone, and one
//! that stands still is woken when this command is gone; whatever it started ends with it.

use rustix::process::{Pid, Signal};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};

/// A server, with the processes that it started.
pub(super) struct Server(Child);

impl Server {
    /// # Errors
    /// The program cannot be started.
    pub(super) fn start(command: &mut Command) -> io::Result<Server> {
        Ok(Server(command.process_group(0).spawn()?))
    }

    pub(super) fn pid(&self) -> u32 {
        self.0.id()
    }

    /// How it has ended, if it has.
    ///
    /// # Errors
    /// The system does not tell.
    pub(super) fn has_ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.0.try_wait()
    }

    /// The pipes that were asked for, and what else the standard library has of a child.
    pub(super) fn pipes(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Ends all of it, if it has not ended; how the server itself did.
    ///
    /// # Errors
    /// The system does not tell.
    pub(super) fn end(&mut self) -> io::Result<ExitStatus> {
        // Once it was waited for, its number may be another's.
        if self.0.try_wait()?.is_none() {
            rustix::process::kill_process_group(Pid::from_child(&self.0), Signal::KILL)?;
        }
        self.0.wait()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _reaped = self.end();
    }
}
