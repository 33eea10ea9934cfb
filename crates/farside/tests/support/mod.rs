//! Runs the command line as a child process, and nodes as children that are killed at the end of their test.
//!
//! Invariant: every wait has a deadline, and no child's output contains a panic.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod driven;
#[allow(unsafe_code, reason = "memory that a peer changes meanwhile")]
pub(crate) mod raw_ring;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Deadline of every wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A `farside` command with an empty environment, so that this machine's settings have no effect.
pub(crate) fn command() -> std::process::Command {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_farside"));
    command.env_clear();
    command
}

/// Exit code, output and duration of a command.
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: Vec<u8>,
    pub(crate) err: String,
    pub(crate) took: Duration,
}

impl Ran {
    /// Asserts exit code 0.
    #[track_caller]
    pub(crate) fn done(self) -> Ran {
        assert_eq!(self.code, Some(0), "{}{}", self.out.escape_ascii(), self.err);
        self
    }

    /// Asserts exit code 2, `reason` on standard error, and nothing on standard output.
    #[track_caller]
    pub(crate) fn refused(self, reason: &str) -> Ran {
        assert_eq!(self.code, Some(2), "expected '{reason}', got '{}'", self.err);
        assert!(self.err.contains(reason), "expected '{reason}', got '{}'", self.err);
        assert!(self.out.is_empty(), "it failed and wrote {}", self.out.escape_ascii());
        self
    }

    /// Asserts exit code 1, `absent` on standard error, and nothing on standard output.
    #[track_caller]
    pub(crate) fn absent(self) -> Ran {
        assert_eq!(self.code, Some(1), "{}", self.err);
        assert!(self.err.contains("absent"), "{}", self.err);
        assert!(self.out.is_empty());
        self
    }

    /// Returns standard output as text.
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.out).expect("text")
    }

    /// Parses the last line of standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        let last = self.text().lines().last().unwrap_or_default();
        serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: '{last}'"))
    }
}

/// Runs a command to its end, with `input` on its standard input.
#[track_caller]
pub(crate) fn run(command: std::process::Command, input: &[u8]) -> Ran {
    run_within(PATIENCE, command, input)
}

/// Runs a command like [`run`], but kills it after `patience`.
#[track_caller]
pub(crate) fn run_within(patience: Duration, command: std::process::Command, input: &[u8]) -> Ran {
    let since = Instant::now();
    let mut command = assert_cmd::Command::from_std(command);
    let output = command.timeout(patience).write_stdin(input).output().expect("the command starts");
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!err.contains("panicked"), "{err}");
    Ran { code: output.status.code(), out: output.stdout, err, took: since.elapsed() }
}

/// Runs `farside` with these arguments.
#[track_caller]
pub(crate) fn farside<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ran {
    let mut command = command();
    command.args(arguments);
    run(command, b"")
}

/// Whether this process ignores a signal, as under `nohup`; its children then ignore it too. If so, prints that the
/// test is skipped.
pub(crate) fn is_ignored(signal: rustix::process::Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).expect("a mask of signals");
    let mask = u64::from_str_radix(mask.trim(), 16).expect("hexadecimal");
    let is_ignored = mask >> (signal.as_raw() - 1) & 1 == 1;
    if is_ignored {
        println!("skipped: this process ignores {signal:?}, and so do its children");
    }
    is_ignored
}

/// Waits until `is_so` returns true; panics after [`PATIENCE`]. `what` describes the condition.
#[track_caller]
pub(crate) fn until(what: &str, is_so: impl FnMut() -> bool) {
    until_within(PATIENCE, what, is_so);
}

/// Waits like [`until`], but panics after `patience`.
#[track_caller]
pub(crate) fn until_within(patience: Duration, what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !is_so() {
        assert!(Instant::now() < deadline, "still not true after {patience:?}: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Calls `check` with each case and its index. All calls run at once, because most of their time is waiting.
pub(crate) fn for_each_at_once<C: Send>(cases: impl IntoIterator<Item = C>, check: impl Fn(usize, C) + Sync) {
    std::thread::scope(|scope| {
        for (nth, case) in cases.into_iter().enumerate() {
            let check = &check;
            scope.spawn(move || check(nth, case));
        }
    });
}

/// A child process that is killed when the test ends.
pub(crate) struct Process {
    child: Child,
    /// Lines of the child's standard output.
    lines: mpsc::Receiver<String>,
    log: PathBuf,
}

impl Process {
    /// Starts the command. Its standard error goes to the file `log`.
    pub(crate) fn start(mut command: std::process::Command, log: PathBuf) -> Process {
        let file = std::fs::File::create(&log).expect("a log");
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .expect("the command starts");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        // The thread exits when the child's output is closed.
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Process { child, lines, log }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the next line of standard output.
    #[track_caller]
    pub(crate) fn line(&self) -> String {
        let line = self.lines.recv_timeout(PATIENCE);
        line.unwrap_or_else(|error| panic!("no line: {error}; standard error: '{}'", self.log()))
    }

    /// Waits for the next line of standard output; `None` if the child exits first.
    #[track_caller]
    pub(crate) fn line_if_any(&self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(mpsc::RecvTimeoutError::Disconnected) => None,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("no line; standard error: '{}'", self.log()),
        }
    }

    /// Returns the lines of standard output that have arrived since.
    pub(crate) fn lines_so_far(&self) -> Vec<String> {
        self.lines.try_iter().collect()
    }

    /// Returns the child's standard error so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal. After `STOP`, returns only once all of the child's threads have stopped.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("the child is not reaped");
        if signal == Signal::STOP {
            // The state stays for the next who waits, and a child that has exited is not waited for.
            let until = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            waitid(WaitId::Pid(pid), until).expect("it is our child");
        }
    }

    /// Returns whether the child has exited.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("it is our child").is_some()
    }

    /// Waits until the child exits; returns its exit code.
    #[track_caller]
    pub(crate) fn ended(&mut self) -> Option<i32> {
        let mut code = None;
        until("the child has exited", || {
            let status = self.child.try_wait().expect("it is our child");
            status.is_some_and(|status| {
                code = status.code();
                true
            })
        });
        code
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it is our child");
        self.ended();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _gone_already = self.child.kill();
        let _reaped_already = self.child.wait();
        if !std::thread::panicking() {
            assert!(!self.log().contains("panicked"), "{}", self.log());
        }
    }
}

/// A node process with a folder of its own.
pub(crate) struct Node {
    pub(crate) process: Process,
    socket: PathBuf,
    folder: TempDir,
}

impl Node {
    /// Starts a node of 96 MiB with a store `default` of 48 MiB, which leaves memory for other stores.
    pub(crate) fn start() -> Node {
        Node::with(&["--memory", "96MiB", "--store", "default", "--quota", "48MiB"])
    }

    pub(crate) fn with(arguments: &[&str]) -> Node {
        Node::within(|command| command, arguments)
    }

    /// Starts a node with the command that `wrap` returns for the node's own command.
    pub(crate) fn within(
        wrap: impl FnOnce(std::process::Command) -> std::process::Command,
        arguments: &[&str],
    ) -> Node {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("node.sock");
        let command = wrap(serve_command(&socket, arguments));
        let process = Process::start(command, folder.path().join("log"));
        let node = Node { process, socket, folder };
        let ready = node.process.line();
        assert!(ready.contains("serves") && ready.contains(&node.url()), "{ready}");
        node
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the url of the node's first engine.
    pub(crate) fn listening(&self) -> String {
        let info = self.run(["info", "--json"]).done().json();
        info["listening"][0].as_str().expect("an engine").to_owned()
    }

    pub(crate) fn url(&self) -> String {
        format!("shm:{}", self.socket.display())
    }

    /// Runs `farside ARGUMENTS` against this node.
    #[track_caller]
    pub(crate) fn run<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Ran {
        self.run_with(arguments, b"")
    }

    #[track_caller]
    pub(crate) fn run_with<S: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
        input: &[u8],
    ) -> Ran {
        let mut command = command();
        command.env("FARSIDE_POOL", self.url()).args(arguments);
        run(command, input)
    }

    /// Returns the number of the node's sessions, without the session of this query.
    pub(crate) fn sessions(&self) -> u64 {
        self.run(["info", "--json"]).done().json()["sessions"].as_u64().expect("a number") - 1
    }

    /// Returns the number of file descriptors that the node holds.
    pub(crate) fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.process.pid())).expect("the process runs").count()
    }

    /// Asserts that the node serves, and that no session and no extra descriptor is left.
    #[track_caller]
    pub(crate) fn assert_well(&self, descriptors_before: usize) {
        self.run(["kv", "put", "is it well", "yes"]).done();
        assert_eq!(self.run(["kv", "get", "is it well"]).done().out, b"yes");
        until("no session is left", || self.sessions() == 0);
        until("no extra descriptor is left", || self.descriptors() <= descriptors_before);
    }
}

/// Starts `farside serve` at `socket`.
pub(crate) fn serve(socket: &Path, arguments: &[&str], log: PathBuf) -> Process {
    Process::start(serve_command(socket, arguments), log)
}

fn serve_command(socket: &Path, arguments: &[&str]) -> std::process::Command {
    let mut command = command();
    command.args(["serve", "--die-with-parent", "--socket"]).arg(socket).args(arguments);
    command
}
