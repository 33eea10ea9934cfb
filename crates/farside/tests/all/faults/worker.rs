//! A client in a separate process. The test starts its own binary again, with a role in the environment; the new
//! process reports on standard output, one line per report.
//!
//! Each task has its own key or word, from which the test reads the outcome of the task's operations.

use crate::faults::{WORDS, connect};
use crate::support::Process;
use farside::Ran;
use farside::parts::{Endpoint, Session};
use farside_fabrics::executor::{Core, block_on};
use farside_fabrics::layer::fault::Faults;
use farside_fabrics::timer;
use farside_remote::control::Store;
use farside_remote::{Addr, ChainBuf, Fabric, FabricError, NodeId, Reply, fetch_add, read_as};
use farside_systems::identity::{Identity, bind};
use farside_systems::kv::prism_kv::PrismKv;
use farside_systems::kv::{Kv, KvError};
use farside_systems::store;
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::{Duration, Instant};
use zerocopy::little_endian::U64;

/// Environment variable with the worker's role, as JSON.
const ROLE: &str = "FARSIDE_TEST_ROLE";
/// Number of tasks that add; the number of tasks that put is the same.
pub(crate) const TASKS: u32 = 24;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Adds and puts until the session is over or `seconds` have passed. The numbers of the worker's words and keys
    /// start at `base`. `loss` and `delay` are the probabilities of these faults for each datagram.
    Operate { url: String, base: u32, seconds: f64, loss: f64, delay: f64 },
    /// Opens clients, leaves them idle, and uses them again once the file `go` exists.
    Idle { url: String, go: PathBuf },
    /// Binds a session to a client with this nonce, and adds to word 0 until that fails. Then connects again, first
    /// with the same nonce. Over mapped memory, each turn has `additions` additions.
    Hold { url: String, nonce: u64, additions: u64 },
}

/// Reported outcomes of one task's operations.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Fates {
    pub(crate) task: u32,
    /// Whether the task puts; otherwise it adds.
    pub(crate) puts: bool,
    /// For additions, the number that were reported as carried out. For puts, the last number that was put.
    pub(crate) done: u64,
    /// Operations whose outcome is unknown: for each put its number, for each addition 0.
    pub(crate) doubtful: Vec<u64>,
    /// Number of operations that failed before the session ended.
    pub(crate) failed: u64,
    /// Error of the operation in flight when the session ended, if it ended.
    pub(crate) last: Option<ReportedError>,
    /// Error of the next operation, which the task started after the session had ended.
    pub(crate) next: Option<ReportedError>,
}

/// An operation's error: whether the operation ran, the error's text, and the microseconds until the operation failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ReportedError {
    pub(crate) ran: String,
    pub(crate) words: String,
    pub(crate) took_us: u64,
}

/// Starts a worker with a role. `wrap` may change the worker's command.
pub(crate) fn start(role: &Role, log: &Path, wrap: impl FnOnce(Command) -> Command) -> Process {
    let mut command = Command::new(std::env::current_exe().expect("this test has a file"));
    command.args(["faults::child", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, serde_json::to_string(role).expect("plain data"));
    let mut command = wrap(command);
    command.env(ROLE, serde_json::to_string(role).expect("plain data"));
    Process::start(command, log.to_owned())
}

/// Waits for the worker's next report of kind `what`.
#[track_caller]
pub(crate) fn await_report<T: serde::de::DeserializeOwned>(child: &Process, what: &str) -> T {
    loop {
        let line = child.line();
        if let Some((word, rest)) = line.strip_prefix('@').and_then(|line| line.split_once(' '))
            && word == what
        {
            return serde_json::from_str(rest).unwrap_or_else(|error| panic!("{error}: {rest}"));
        }
    }
}

fn report(word: &str, what: &impl Serialize) {
    let line = format!("\n@{word} {}\n", serde_json::to_string(what).expect("plain data"));
    let mut out = std::io::stdout().lock();
    out.write_all(line.as_bytes()).and_then(|()| out.flush()).expect("the parent reads");
}

/// Runs the role in this process's environment. Does nothing if there is none.
pub(crate) fn run_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
        .expect("Linux supports it");
    match serde_json::from_str(&role).expect("a role") {
        Role::Operate { url, base, seconds, loss, delay } => operate(&url, base, seconds, loss, delay),
        Role::Idle { url, go } => idle(&url, &go),
        Role::Hold { url, nonce, additions } => hold(&url, nonce, additions),
    }
}

fn hold(url: &str, nonce: u64, additions: u64) {
    let endpoint = Rc::new(connect(url).endpoint_here().expect("a session"));
    let words = words_of(&endpoint);
    let identity = Identity { client: 1, nonce };
    block_on(&endpoint, bind(&endpoint, NodeId(0), &words, identity)).expect("nobody has fenced it");
    let mut added = 0_u64;
    let mut has_reported = false;
    let error = loop {
        let turn = async {
            for _ in 0..additions {
                add(&endpoint, &words, 0).await?;
                added += 1;
            }
            Ok::<(), FabricError>(())
        };
        if let Err(error) = block_on(&endpoint, turn) {
            break error;
        }
        if added >= 100 && !std::mem::replace(&mut has_reported, true) {
            report("progress", &added);
        }
    };
    report("refused", &(added, error.is_fenced(), format!("{:?}", error.ran()), error.to_string()));
    let next = block_on(&endpoint, add(&endpoint, &words, 0)).expect_err("the session is fenced");
    report("next", &(next.is_fenced(), format!("{:?}", next.ran())));

    let endpoint = Rc::new(connect(url).endpoint_here().expect("another session"));
    let words = words_of(&endpoint);
    let again = block_on(&endpoint, bind(&endpoint, NodeId(0), &words, identity)).expect_err("fenced");
    report("again", &(again.is_fenced(), again.to_string()));
    let new = Identity { client: 1, nonce: nonce + 1 };
    block_on(&endpoint, bind(&endpoint, NodeId(0), &words, new)).expect("a new nonce is a new client");
    report("new", &block_on(&endpoint, add(&endpoint, &words, 1)).is_ok());
}

/// The description of the store of words, with this session's key.
pub(crate) fn words_of(endpoint: &Rc<Endpoint>) -> Store {
    block_on(endpoint, store::fetch(&**endpoint, NodeId(0), WORDS)).expect("the store exists")
}

/// Reads a word.
pub(crate) fn count_of(endpoint: &Endpoint, words: &Store, place: u32) -> u64 {
    let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
    let mut chain = buffer.begin(words.extent().key);
    let read = chain.also(read_as::<U64>(word(words, place)));
    block_on(endpoint, endpoint.run(NodeId(0), &chain, &mut reply)).expect("read");
    reply.get(read).expect("the word is in the store").get()
}

fn operate(url: &str, base: u32, seconds: f64, loss: f64, delay: f64) {
    let seed = u64::from(std::process::id());
    let wait = Duration::from_millis(1)..=Duration::from_millis(20);
    let faults = Faults { loss, delay, wait, seed, ..Faults::default() };
    let pool = connect(url).with_faults(faults).expect("the fabric can have these faults");
    let endpoint = Rc::new(retry(|| pool.endpoint_here()));
    report("datagram", &datagram(&endpoint));
    let open = |name: &'static str| {
        let open = || block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), name));
        retry(open)
    };
    // Puts and gets a value of many datagrams.
    let large: Vec<u8> = (0..50_000u32).map(|n| (n / 3) as u8).collect();
    let mut kv = open("default");
    let key = format!("large {base}");
    retry(|| block_on(&endpoint, kv.put(key.as_bytes(), &large)));
    retry(|| {
        let stored = block_on(&endpoint, kv.get(key.as_bytes()))?;
        assert!(stored.is_some_and(|item| item.value == large), "the value is as it was put");
        Ok::<_, KvError>(())
    });

    let words = open(WORDS).store().clone();
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let (done, left) = (Cell::new(0u64), Cell::new(2 * TASKS));
    let fates = RefCell::new(Vec::new());
    let mut core = Core::new(&endpoint);
    for task in 0..TASKS {
        let (endpoint, words, done, left, fates) = (&endpoint, &words, &done, &left, &fates);
        core.spawn(async move {
            let mut own = Fates { task, ..Fates::default() };
            while Instant::now() < until {
                match add(endpoint, words, base + task).await {
                    Ok(_) => own.done += 1,
                    Err(error) => {
                        match error.ran() {
                            Ran::Yes => own.done += 1,
                            Ran::Unknown => own.doubtful.push(0),
                            Ran::No => {}
                        }
                        if matches!(error, FabricError::Lost { .. }) {
                            own.last = Some(reported(error.ran(), &error, Instant::now()));
                            let since = Instant::now();
                            let next =
                                add(endpoint, words, base + task).await.expect_err("the session is over");
                            own.next = Some(reported(next.ran(), &next, since));
                            break;
                        }
                        own.failed += 1;
                    }
                }
                done.set(done.get() + 1);
                stagger(task, done.get()).await;
            }
            left.set(left.get() - 1);
            fates.borrow_mut().push(own);
        });
        let mut kv = open("default");
        core.spawn(async move {
            let key = key_of(base + task);
            let mut own = Fates { task, puts: true, ..Fates::default() };
            for number in 1u64.. {
                if Instant::now() >= until {
                    break;
                }
                match kv.put(&key, &number.to_le_bytes()).await {
                    Ok(()) => {
                        own.done = number;
                        own.doubtful.clear();
                    }
                    Err(error) => {
                        match error.ran() {
                            Ran::Yes => own.done = number,
                            Ran::Unknown => own.doubtful.push(number),
                            Ran::No => {}
                        }
                        if matches!(error, KvError::Fabric(FabricError::Lost { .. })) {
                            own.last = Some(reported(error.ran(), &error, Instant::now()));
                            let since = Instant::now();
                            let next = kv.put(&key, b"never").await.expect_err("the session is over");
                            own.next = Some(reported(next.ran(), &next, since));
                            break;
                        }
                        own.failed += 1;
                    }
                }
                done.set(done.get() + 1);
                stagger(task, done.get()).await;
            }
            left.set(left.get() - 1);
            fates.borrow_mut().push(own);
        });
    }
    let (done, left) = (&done, &left);
    core.spawn(async move {
        while left.get() > 0 {
            report("progress", &done.get());
            timer::sleep(Duration::from_millis(100)).await;
        }
    });
    core.run();
    drop(core);
    report("strikes", &pool.strikes().expect("the pool has faults").to_string());
    report("fates", &(base, fates.into_inner()));
}

/// Sleeps for 0 to 300 us, so that the tasks' requests travel in different datagrams: requests in one datagram share
/// its faults.
async fn stagger(task: u32, done: u64) {
    let step = (u64::from(task) * 13 + done * 7) % 31;
    timer::sleep(Duration::from_micros(10 * step)).await;
}

/// Retries an operation up to 20 times: under heavy loss, several may time out.
fn retry<O, E>(mut operation: impl FnMut() -> Result<O, E>) -> O {
    let mut tries = (0..20).map(|_| operation());
    tries.find_map(Result::ok).expect("one of 20 attempts succeeds")
}

fn key_of(place: u32) -> Vec<u8> {
    format!("key {place}").into_bytes()
}

fn reported(ran: Ran, error: &dyn std::fmt::Display, since: Instant) -> ReportedError {
    ReportedError {
        ran: format!("{ran:?}"),
        words: error.to_string(),
        took_us: since.elapsed().as_micros() as u64,
    }
}

/// Returns the maximum number of bytes of a datagram of this session.
fn datagram(endpoint: &Endpoint) -> usize {
    match endpoint {
        Endpoint::One(Session::FaultyUdp(remote)) => remote.granted().datagram,
        Endpoint::One(Session::FaultyTcp(remote)) => remote.granted().datagram,
        _ => panic!("the pool has faults"),
    }
}

async fn add(endpoint: &Endpoint, words: &Store, place: u32) -> Result<u64, FabricError> {
    let (mut buffer, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
    let mut chain = buffer.begin(words.extent().key);
    let old = chain.also(fetch_add(word(words, place), &one));
    endpoint.run(NodeId(0), &chain, &mut reply).await?;
    Ok(reply.get(old).expect("the word is in the store").get())
}

/// Returns the address of a counter: the half of a slot that holds no pointer, so that the node never follows the
/// counter as a pointer.
fn word(words: &Store, place: u32) -> Addr {
    Addr::new(words.table_at + 8 + 16 * u64::from(place))
}

/// Compares a worker's reported outcomes with the contents of the store, read over another session. Returns how many of
/// the tasks' last additions were reported as not run, as run, and as unknown, in this order.
#[track_caller]
pub(crate) fn judge(url: &str, (base, fates): &(u32, Vec<Fates>)) -> [usize; 3] {
    let endpoint = Rc::new(connect(url).endpoint_here().expect("a session"));
    let open = |name: &'static str| block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), name));
    let (words, mut kv) = (open(WORDS).expect("a store").store().clone(), open("default").expect("a store"));
    let mut counts = [0; 3];
    assert_eq!(fates.len(), 2 * TASKS as usize);
    for fate in fates {
        let place = base + fate.task;
        if fate.puts {
            let item = block_on(&endpoint, kv.get(&key_of(place))).expect("read");
            let number =
                item.map_or(0, |item| u64::from_le_bytes(item.value.try_into().expect("eight bytes")));
            assert!(number == fate.done || fate.doubtful.contains(&number), "{number} is stored: {fate:?}");
        } else {
            let count = count_of(&endpoint, &words, place);
            let most = fate.done + fate.doubtful.len() as u64;
            assert!((fate.done..=most).contains(&count), "{count} additions ran: {fate:?}");
        }
        if let Some(last) = fate.last.as_ref().filter(|_| !fate.puts) {
            counts
                [["No", "Yes", "Unknown"].iter().position(|ran| *ran == last.ran).expect("one of three")] +=
                1;
        }
    }
    counts
}

/// Runs a client of each kind. Both clients are idle until the file `go` exists, and then continue.
fn idle(url: &str, go: &Path) {
    let pool = connect(url);
    let mut local = farside::local::Client::open(&pool, "default").expect("a store").with_slot_cache(16);
    let client = pool.open("default").expect("a store");
    local.put(b"local", b"before").expect("stored");
    client.put("client", "before").wait().expect("stored");
    report("ready", &());
    while !go.exists() {
        std::thread::sleep(Duration::from_millis(20));
    }
    local.put(b"local", b"after").expect("stored, over another session");
    assert_eq!(local.get(b"local").expect("read").expect("present").value, b"after");
    assert!(local.delete(b"local").expect("deleted"));
    // All in flight at once: none is lost while the client opens another session.
    let keys: Vec<String> = (0..100).map(|n| format!("client {n}")).collect();
    let puts: Vec<_> = keys.iter().map(|key| client.put(key.as_str(), "after")).collect();
    puts.into_iter().for_each(|put| put.wait().expect("stored, over another session"));
    for key in &keys {
        assert_eq!(client.get(key.as_str()).wait().expect("read").expect("present").value, b"after");
    }
    assert_eq!(client.get("client").wait().expect("read").expect("present").value, b"before");
    report("well", &());
}
