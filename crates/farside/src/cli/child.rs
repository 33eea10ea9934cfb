//! Servers that a command starts and ends: nodes of its own, rivals.
//!
//! Invariant: a server is in a process group of its own, so that a terminal's Ctrl-C is this command's alone, and one
//! that stands still is woken when this command is gone. Invariant: what it has started ends when the server is ended
//! here; where this command is killed, the system ends the server alone.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus};

/// A server, with the processes that it started.
pub(super) struct Server {
    child: Child,
    /// How it ended, once it was waited for: from then on its number may be another's.
    ended: Option<ExitStatus>,
}

impl Server {
    /// # Errors
    /// The program cannot be started.
    pub(super) fn start(command: &mut Command) -> io::Result<Server> {
        Ok(Server { child: command.process_group(0).spawn()?, ended: None })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it writes, if that was asked for.
    pub(super) fn stdout(&mut self) -> &mut Option<ChildStdout> {
        &mut self.child.stdout
    }

    /// As [`stdout`](Server::stdout), of standard error.
    pub(super) fn stderr(&mut self) -> &mut Option<ChildStderr> {
        &mut self.child.stderr
    }

    /// How it has ended, if it has; what it started has then ended too.
    ///
    /// # Errors
    /// The system does not tell.
    pub(super) fn has_ended(&mut self) -> io::Result<Option<ExitStatus>> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let pid = Pid::from_child(&self.child);
        if self.ended.is_none() && waitid(WaitId::Pid(pid), look)?.is_none() {
            return Ok(None);
        }
        self.end().map(Some)
    }

    /// Waits until it has ended by itself; how it did.
    ///
    /// # Errors
    /// The system does not tell.
    pub(super) fn wait(&mut self) -> io::Result<ExitStatus> {
        if self.ended.is_none() {
            waitid(WaitId::Pid(Pid::from_child(&self.child)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
        }
        self.end()
    }

    /// Ends all of it that has not ended; how the server itself did.
    ///
    /// # Errors
    /// It may not be ended, or the system does not tell.
    pub(super) fn end(&mut self) -> io::Result<ExitStatus> {
        if let Some(ended) = self.ended {
            return Ok(ended);
        }
        if kill_process_group(Pid::from_child(&self.child), Signal::KILL).is_err() {
            self.child.kill()?;
        }
        let ended = self.child.wait()?;
        self.ended = Some(ended);
        Ok(ended)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _reaped = self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::Stdio;

    /// A shell that has started a process of its own, which it tells, and then does as it is told.
    fn shell(then: &str) -> (Server, Pid) {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("sleep 100 >&2 & echo $!; {then}")]).stdout(Stdio::piped());
        let mut server = Server::start(&mut command).expect("a shell");
        let mut line = String::new();
        BufReader::new(server.stdout().as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
        (server, Pid::from_raw(line.trim().parse().expect("a pid")).expect("more than 0"))
    }

    fn is_gone(pid: Pid) -> bool {
        // Whoever adopted it may not have waited for it yet.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
        stat.map_or(true, |stat| stat.rsplit(')').next().is_some_and(|rest| rest.trim().starts_with('Z')))
    }

    fn ends(pid: Pid) -> bool {
        (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            is_gone(pid)
        })
    }

    #[test]
    fn what_a_server_started_ends_with_it() {
        let (server, started) = shell("wait");
        assert!(!is_gone(started));
        drop(server);
        assert!(ends(started));
    }

    #[test]
    fn what_a_server_started_ends_also_where_the_server_has_ended_before() {
        let (mut server, started) = shell("exit 3");
        let status = server.wait().expect("it has ended");
        assert_eq!(status.code(), Some(3));
        assert!(ends(started));
        assert_eq!(server.has_ended().expect("it is known").and_then(|status| status.code()), Some(3));
    }

    #[test]
    fn one_that_runs_has_not_ended() {
        let (mut server, _) = shell("wait");
        assert!(server.has_ended().expect("it is known").is_none());
        assert_eq!(server.end().expect("it ends").code(), None);
    }
}
