//! Child processes. The test's binary starts itself again with a role in the environment, and exchanges lines with the
//! child.
//!
//! Invariant: a child never outlives its parent, and every wait has a deadline.

use super::bank::Bank;
use super::deadly::{Deadly, Strike};
use super::deadly_table::{DeadlyTable, Strike as TableStrike, Table};
use super::index_script;
use super::kept_index::KeptIndex;
use super::script::{self, Op};
use super::{deadly_bank, deadly_index};
use farside_fabrics::executor::block_on;
use farside_fabrics::memory::{Found, Mapping, Pages};
use farside_fabrics::shm;
use farside_node::host::{Host, Options};
use farside_remote::NodeId;
use farside_remote::control::{Answer, Ask};
use farside_systems::kv::Kv;
use farside_systems::kv::prism_kv::{KIND, PrismKv};
use farside_systems::registry::all_kinds;
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::rc::Rc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Environment variable that holds the role of a child.
const ROLE: &str = "FARSIDE_TEST_ROLE";
/// Name of the test that plays the role of a child.
const CHILD: &str = "life_and_death::child";
/// Longest wait for a child, even on a slow machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Role {
    /// A memory node that handles requests from its standard input.
    Node { socket: PathBuf, mib: u64, evict_stopped_after: Option<Duration> },
    /// A memory node as [`Role::Node`], whose memory is a file. If the file has a node's memory, it takes over.
    FileNode { socket: PathBuf, file: PathBuf, mib: u64 },
    /// A client of an index that runs the operations of the index's script, one after the other.
    IndexClient {
        socket: PathBuf,
        store: String,
        table: Table,
        entropy: u64,
        strike: Option<TableStrike<deadly_index::Phase>>,
    },
    /// A client of a bank that commits transfers, one after the other.
    BankClient {
        socket: PathBuf,
        store: String,
        table: Table,
        entropy: u64,
        strike: Option<TableStrike<deadly_bank::Phase>>,
    },
    /// A client that runs the operations of a script, one after the other.
    Client { socket: PathBuf, store: String, seed: u64, tour: bool, slot_cache: bool, strike: Option<Strike> },
}

/// Plays the role that the environment names. Does nothing if the environment names no role.
pub(crate) fn play() {
    let Ok(role) = std::env::var(ROLE) else { return };
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("the system supports it");
    match serde_json::from_str(&role).expect("a role") {
        Role::Node { socket, mib, evict_stopped_after } => {
            let memory = Mapping::create(mib << 20, Pages::Small).expect("memory");
            serve(memory, Options { socket: Some(socket), evict_stopped_after, ..Options::default() });
        }
        Role::FileNode { socket, file, mib } => {
            let (memory, found) = Mapping::open(&file, mib << 20).expect("memory");
            let take_over = found == Found::Memory;
            serve(memory, Options { socket: Some(socket), take_over, ..Options::default() });
        }
        Role::IndexClient { socket, store, table, entropy, strike } => {
            operate_index(&socket, &store, table, entropy, strike);
        }
        Role::BankClient { socket, store, table, entropy, strike } => {
            transfer(&socket, &store, table, entropy, strike);
        }
        Role::Client { socket, store, seed, tour, slot_cache, strike } => {
            operate(&socket, &store, seed, tour, slot_cache, strike)
        }
    }
}

/// Sends a line to the parent: `word`, then `what` as JSON.
pub(crate) fn say(word: &str, what: &impl Serialize) {
    let line = format!("\n@{word} {}\n", serde_json::to_string(what).expect("plain data"));
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).expect("the parent reads");
}

fn serve(memory: Mapping, options: Options) {
    let host = Host::start(memory, all_kinds(), options).expect("a node");
    say("ready", &());
    for line in std::io::stdin().lines() {
        let line = line.expect("a line from the parent");
        if line == "stopped" {
            say("answer", &host.stopped_pids());
            continue;
        }
        let ask: Ask = serde_json::from_str(&line).expect("a request");
        say("answer", &host.ask(ask, PATIENCE).map_err(|error| error.to_string()));
    }
}

fn operate(socket: &Path, store: &str, seed: u64, tour: bool, slot_cache: bool, strike: Option<Strike>) {
    let endpoint = shm::connect_on(socket, NodeId(0), |memory| Deadly::over(memory, strike));
    let endpoint = Rc::new(endpoint.expect("a connection"));
    let client = block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), store));
    let mut client = client.expect("the store exists");
    if slot_cache {
        client = client.with_slot_cache(64);
    }
    say("session", &(endpoint.session().number, endpoint.session().slot));
    for index in 0.. {
        let op = match tour {
            true => script::TOUR.get(index as usize).copied(),
            false => Some(script::endless(seed, index)),
        };
        let Some(op) = op else { break };
        match op {
            Op::Pause => std::thread::sleep(Duration::from_millis(50)),
            Op::Put { key, len } => {
                let value = script::value(seed, index, len);
                block_on(&endpoint, client.put(&script::key(seed, key), &value)).expect("stored");
            }
            Op::Delete { key } => {
                block_on(&endpoint, client.delete(&script::key(seed, key))).expect("deleted");
            }
        }
        // With a line after every operation, the process would spend most of its time in system calls.
        if tour || index % 16 == 15 {
            say("done", &(index + 1));
        }
    }
    say("seen", &*endpoint.memory().observer.seen.borrow());
}

fn operate_index(
    socket: &Path,
    store: &str,
    table: Table,
    entropy: u64,
    strike: Option<TableStrike<deadly_index::Phase>>,
) {
    let endpoint = shm::connect_on(socket, NodeId(0), |memory| DeadlyTable::over(memory, table, strike));
    let endpoint = Rc::new(endpoint.expect("a connection"));
    let mut client = KeptIndex::open(Rc::clone(&endpoint), store, entropy);
    for (index, op) in index_script::TOUR.into_iter().enumerate() {
        index_script::perform(&mut client, index, op);
        say("done", &(index + 1));
    }
    client.leave();
    say("seen", &*endpoint.memory().observer.seen.borrow());
}

fn transfer(
    socket: &Path,
    store: &str,
    table: Table,
    entropy: u64,
    strike: Option<TableStrike<deadly_bank::Phase>>,
) {
    let endpoint = shm::connect_on(socket, NodeId(0), |memory| DeadlyTable::over(memory, table, strike));
    let endpoint = Rc::new(endpoint.expect("a connection"));
    let mut client = Bank::open(Rc::clone(&endpoint), store, entropy);
    client.work(|transfers| say("done", &transfers));
    client.leave();
    say("seen", &*endpoint.memory().observer.seen.borrow());
}

/// Parent's handle of a child process. Dropping the handle kills the child.
pub(crate) struct Child {
    process: std::process::Child,
    role: Role,
    lines: Receiver<String>,
    /// Lines received so far, for failure messages.
    heard: Vec<String>,
}

impl Child {
    pub(crate) fn start(role: Role) -> Child {
        let mut process = Command::new(std::env::current_exe().expect("the test's own path"))
            .args([CHILD, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, serde_json::to_string(&role).expect("plain data"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test's binary starts again");
        let out = BufReader::new(process.stdout.take().expect("a pipe"));
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix('@') {
                    let _nobody_listens = send.send(line.to_owned());
                }
            }
        });
        Child { process, role, lines, heard: Vec::new() }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits for the next line with this word and returns the line's value. Keeps the lines before that line for
    /// failure messages.
    pub(crate) fn hear<T: for<'a> Deserialize<'a>>(&mut self, word: &str) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    let found = parse(&line, word);
                    self.heard.push(line);
                    if let Some(found) = found {
                        return found;
                    }
                }
                Err(why) => {
                    let why = if why == RecvTimeoutError::Timeout { "sends no line" } else { "has exited" };
                    panic!("{:?} {why}, but '{word}' was expected; so far: {:?}", self.role, self.heard)
                }
            }
        }
    }

    /// Reads all remaining lines and returns the value of the last line with this word. The process must have exited.
    pub(crate) fn heard_last<T: for<'a> Deserialize<'a>>(&mut self, word: &str) -> Option<T> {
        let deadline = Instant::now() + PATIENCE;
        // The channel closes when the pipe does.
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            self.heard.push(line);
        }
        self.heard.iter().rev().find_map(|line| parse(line, word))
    }

    fn tell(&mut self, line: &str) {
        let input = self.process.stdin.as_mut().expect("a pipe");
        writeln!(input, "{line}").and_then(|()| input.flush()).expect("the child reads");
    }

    /// Sends a request to a node, which must not refuse it.
    pub(crate) fn ask(&mut self, ask: &Ask) -> Answer {
        self.try_ask(ask).unwrap_or_else(|reason| panic!("{ask:?}: {reason}"))
    }

    /// Sends a request to a node and waits for the node's answer.
    pub(crate) fn try_ask(&mut self, ask: &Ask) -> Result<Answer, String> {
        self.tell(&serde_json::to_string(ask).expect("plain data"));
        self.hear("answer")
    }

    /// Returns the processes that a node reports as stopped in the middle of a turn.
    pub(crate) fn stopped_pids(&mut self) -> Vec<u32> {
        self.tell("stopped");
        self.hear("answer")
    }

    pub(crate) fn create(&mut self, name: &str, mib: u64) -> farside_remote::control::Store {
        let parameters = r#"{"items": 1000}"#.into();
        let ask = Ask::CreateStore { name: name.into(), kind: KIND.into(), parameters, quota: mib << 20 };
        match self.ask(&ask) {
            Answer::Store(store) => store,
            other => panic!("expected a store, got {other:?}"),
        }
    }

    pub(crate) fn stat(&mut self, name: &str) -> farside_remote::control::StoreStat {
        match self.ask(&Ask::StoreStat { name: name.into() }) {
            Answer::StoreStat(stat) => stat,
            other => panic!("expected figures, got {other:?}"),
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).expect("a valid pid");
        rustix::process::kill_process(pid, signal).expect("the process has not been waited for");
    }

    /// Stops the process, and waits until it is stopped.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        until("a process is stopped", || shm::is_stopped(self.pid()));
    }

    /// Waits until the process is stopped or exits. Returns whether it is stopped.
    pub(crate) fn wait_or_stop(&mut self) -> bool {
        until("a process is stopped or exits", || {
            shm::is_stopped(self.pid()) || self.process.try_wait().expect("a child process").is_some()
        });
        shm::is_stopped(self.pid())
    }

    /// Waits until the process exits, and returns its status.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        until("a process exits", || {
            status = self.process.try_wait().expect("a child process");
            status.is_some()
        });
        status.expect("the process has exited")
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ended_already = self.process.kill();
        let _waited_already = self.process.wait();
    }
}

fn parse<T: for<'a> Deserialize<'a>>(line: &str, word: &str) -> Option<T> {
    let (said, what) = line.split_once(' ')?;
    (said == word).then(|| serde_json::from_str(what).expect("children send plain data"))
}

/// Waits until a condition holds. Returns the time of the wait.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) -> Duration {
    let since = Instant::now();
    while !is_so() {
        assert!(since.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
    since.elapsed()
}

/// Makes the tests that call it run one at a time, because they measure time and their processes use both cores.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}
