//! Servers that a command starts as child processes and ends: nodes, and the servers of rivals such as Redis.
//!
//! Invariant: a server has its own process group. So Ctrl-C at a terminal signals this command alone. If this command
//! ends while a server is stopped, the system continues the server.
//! Invariant: when this command ends a server, it also ends the processes that the server started. If this command is
//! killed, the system ends only the server.

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

/// A server process, with the processes that it started.
pub(super) struct Server {
    child: Child,
    /// Exit status of the child; `None` until this process has waited for the child. Afterwards the child's process id
    /// may belong to another process.
    ended: Option<ExitStatus>,
}

impl Server {
    /// Starts a server in its own process group.
    ///
    /// # Errors
    /// The program cannot be started.
    pub(super) fn start(command: &mut Command) -> io::Result<Server> {
        Ok(Server { child: command.process_group(0).spawn()?, ended: None })
    }

    /// Starts a server in its own process group, with its standard output piped, and reads the first line. The line is
    /// empty if the server ended without one.
    ///
    /// # Errors
    /// The program cannot be started, or its output cannot be read.
    pub(super) fn start_and_read_line(command: &mut Command) -> io::Result<(Server, String)> {
        let mut server = Server::start(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
        let mut line = String::new();
        // The pipe stays open, because the server writes further lines, and a closed pipe would kill the server.
        if let Some(output) = server.stdout() {
            BufReader::new(output).read_line(&mut line)?;
        }
        Ok((server, line))
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The server's standard input, if it is piped.
    pub(super) fn stdin(&mut self) -> &mut Option<ChildStdin> {
        &mut self.child.stdin
    }

    /// The server's standard output, if it is piped.
    pub(super) fn stdout(&mut self) -> &mut Option<ChildStdout> {
        &mut self.child.stdout
    }

    /// The server's standard error, if it is piped.
    pub(super) fn stderr(&mut self) -> &mut Option<ChildStderr> {
        &mut self.child.stderr
    }

    /// Returns the exit status if the server has ended, and kills the processes that the server started. Returns `None`
    /// while the server runs.
    ///
    /// # Errors
    /// The system cannot report the server's state.
    pub(super) fn has_ended(&mut self) -> io::Result<Option<ExitStatus>> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let pid = Pid::from_child(&self.child);
        if self.ended.is_none() && waitid(WaitId::Pid(pid), look)?.is_none() {
            return Ok(None);
        }
        self.end().map(Some)
    }

    /// Waits until the server ends by itself, kills the processes that it started, and returns the server's exit
    /// status.
    ///
    /// # Errors
    /// The system cannot report the server's state.
    pub(super) fn wait(&mut self) -> io::Result<ExitStatus> {
        if self.ended.is_none() {
            waitid(WaitId::Pid(Pid::from_child(&self.child)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
        }
        self.end()
    }

    /// Sends SIGTERM to the server, unless it has ended.
    pub(super) fn ask_to_end(&self) {
        if self.ended.is_none() {
            let _ended_by_itself = kill_process(Pid::from_child(&self.child), Signal::TERM);
        }
    }

    /// Kills the server's process group, and returns the exit status of the server.
    ///
    /// # Errors
    /// This process may not kill the server, or the system cannot report the server's state.
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

    /// Starts a shell that starts a process, prints that process's id, and then runs the command `then`.
    fn shell(then: &str) -> (Server, Pid) {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("sleep 100 >&2 & echo $!; {then}")]).stdout(Stdio::piped());
        let mut server = Server::start(&mut command).expect("a shell");
        let mut line = String::new();
        BufReader::new(server.stdout().as_mut().expect("a pipe")).read_line(&mut line).expect("a line");
        (server, Pid::from_raw(line.trim().parse().expect("a pid")).expect("more than 0"))
    }

    fn is_gone(pid: Pid) -> bool {
        // A zombie counts as gone: its new parent may not have waited for it yet.
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
    fn child_processes_of_a_server_end_with_it() {
        let (server, started) = shell("wait");
        assert!(!is_gone(started));
        drop(server);
        assert!(ends(started));
    }

    #[test]
    fn child_processes_end_even_if_the_server_has_exited_first() {
        let (mut server, started) = shell("exit 3");
        let status = server.wait().expect("the server exits");
        assert_eq!(status.code(), Some(3));
        assert!(ends(started));
        assert_eq!(server.has_ended().expect("a status").and_then(|status| status.code()), Some(3));
    }

    #[test]
    fn a_running_server_has_not_ended() {
        let (mut server, _) = shell("wait");
        assert!(server.has_ended().expect("a status").is_none());
        assert_eq!(server.end().expect("the server is killed").code(), None);
    }
}
