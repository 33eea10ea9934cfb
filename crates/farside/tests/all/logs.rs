//! Stores whose logs survive their node: a real process is killed with -9 under load, and the next one starts with
//! fresh memory and the log.
//!
//! Each key has one writer, which knows what the key may hold: what was acknowledged last, or what it has tried to
//! store since without an answer.
//!
//! Invariant: every wait has a deadline, so that a test fails rather than hangs.

use crate::support::{PATIENCE, Process, serve};
use farside::{Error, NewStore, Ran, connect};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of keys of each writer.
const KEYS: usize = 16;
/// Length from which clients write values themselves. The values of the tests are shorter and longer.
const THRESHOLD: u32 = 1024;

/// Returns a value that begins with its number and is at most three thresholds long.
fn value_of(number: u64) -> Vec<u8> {
    let mut value = number.to_string().into_bytes();
    let len = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (3 * u64::from(THRESHOLD));
    value.push(b' ');
    value.resize(value.len().max(len as usize), (number % 251) as u8);
    value
}

/// Waits for a write and returns its outcome.
type Write = Box<dyn FnOnce() -> Result<(), Error>>;

/// Keys that one client alone writes.
struct Writer {
    client: farside::Client,
    /// Each key with the numbers of the values that it may hold, in the order of the puts. `None` is no value.
    keys: Vec<(String, Vec<Option<u64>>)>,
    last: u64,
}

impl Writer {
    fn new(client: farside::Client, name: &str) -> Writer {
        let keys = (0..KEYS).map(|n| (format!("{name} {n}"), vec![None])).collect();
        Writer { client, keys, last: 0 }
    }

    /// Writes all keys at the same time. Returns the number of writes that were acknowledged.
    fn write(&mut self) -> usize {
        let (client, last) = (&self.client, &mut self.last);
        let mut begin = |key: &str| -> (Option<u64>, Write) {
            *last += 1;
            if last.is_multiple_of(7) {
                let delete = client.delete(key);
                (None, Box::new(|| delete.wait().map(drop)))
            } else {
                let put = client.put(key, value_of(*last));
                (Some(*last), Box::new(|| put.wait()))
            }
        };
        let writes: Vec<_> = self.keys.iter().map(|(key, _)| begin(key)).collect();
        let mut acknowledged = 0;
        for ((_, may_hold), (number, outcome)) in self.keys.iter_mut().zip(writes) {
            match outcome() {
                Ok(()) => {
                    acknowledged += 1;
                    *may_hold = vec![number];
                }
                Err(error) if error.ran() != Ran::No => may_hold.push(number),
                Err(_) => {}
            }
        }
        acknowledged
    }

    /// Reads all keys and checks what they hold. Returns the last error if not all could be read.
    fn check(&mut self) -> Result<(), Error> {
        let reads: Vec<_> = self.keys.iter().map(|(key, _)| self.client.get(&key[..])).collect();
        let mut outcome = Ok(());
        for ((key, may_hold), read) in self.keys.iter_mut().zip(reads) {
            let read = match read.wait() {
                Ok(read) => read,
                Err(error) => {
                    outcome = Err(error);
                    continue;
                }
            };
            let number = read.map(|read| {
                let text = String::from_utf8_lossy(&read.value).into_owned();
                let number = text.split(' ').next().and_then(|number| number.parse().ok()).expect("a number");
                assert_eq!(read.value, value_of(number), "{key} holds other bytes than were put");
                number
            });
            let place = may_hold.iter().position(|held| *held == number);
            let place = place.unwrap_or_else(|| panic!("{key} holds {number:?}, and may hold {may_hold:?}"));
            may_hold.drain(..place);
        }
        outcome
    }
}

fn start(folder: &Path, round: usize, listen: &str) -> Process {
    let log = folder.join("log").display().to_string();
    let arguments = ["--memory", "64MiB", "--listen", listen, "--log-dir", &log, "--log-sync", "each"];
    let node = serve(&folder.join("socket"), &arguments, folder.join(format!("out-{round}")));
    node.line();
    node
}

/// The command line of a service names its store at each start.
#[test]
fn a_store_that_came_with_a_log_is_not_created_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    let (socket, logs) = (at("socket"), at("log").display().to_string());
    let serve = |more: &[&str], out| {
        let arguments = [more, &["--memory", "32MiB", "--log-dir", &logs]].concat();
        let node = serve(&socket, &arguments, at(out));
        node.line();
        node
    };
    let mut node = serve(&[], "out-0");
    let pool = connect(&format!("shm:{}", socket.display())).expect("the node serves");
    let new = NewStore { kind: "chequer".into(), ..NewStore::prism_kv("s", 8 << 20) };
    pool.create_store(&new).expect("the node has memory");
    pool.open("s").expect("the store").put("k", "v").wait().expect("stored");
    node.kill();
    let _node = serve(&["--store", "s"], "out-1");
    let got = pool.open("s").expect("the store").get("k").wait().expect("read");
    assert_eq!(got.expect("it was stored").value, b"v");
}

/// Kills the node of a store of this kind `rounds` times while clients write to the store over shm and tcp.
fn kill_under_load(kind: &str, rounds: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let mut node = start(folder.path(), 0, "tcp://127.0.0.1:0");
    let shm = format!("shm:{}", folder.path().join("socket").display());
    let tcp = connect(&shm).expect("the node serves").info().expect("its info").listening[0].clone();
    let new =
        NewStore { kind: kind.into(), put_threshold: Some(THRESHOLD), ..NewStore::prism_kv("s", 32 << 20) };
    connect(&shm).expect("the node serves").create_store(&new).expect("the node has memory");
    let is_over = AtomicBool::new(false);
    let acknowledged = [const { AtomicU64::new(0) }; 2];
    std::thread::scope(|scope| {
        for (url, acknowledged) in [&shm, &tcp].into_iter().zip(&acknowledged) {
            let is_over = &is_over;
            scope.spawn(move || {
                let open = || connect(url).and_then(|pool| pool.open("s"));
                let mut writer = Writer::new(open().expect("the node serves the store"), url);
                // A client over shm has mapped the memory of the dead node. Clients over carriers go on by themselves.
                let check = |writer: &mut Writer| match writer.check() {
                    Err(error) if url.starts_with("shm:") => {
                        if let Ok(client) = open() {
                            writer.client = client;
                        }
                        Err(error)
                    }
                    checked => checked,
                };
                while !is_over.load(Ordering::Relaxed) {
                    acknowledged.fetch_add(writer.write() as u64, Ordering::Relaxed);
                    let _ = check(&mut writer);
                }
                let deadline = Instant::now() + PATIENCE;
                while let Err(error) = check(&mut writer) {
                    assert!(Instant::now() < deadline, "{url}: not all keys are read again: {error}");
                }
                assert_eq!(writer.write(), KEYS, "{url}: all keys are written again");
                writer.check().expect("all keys are read again");
            });
        }
        for round in 1..=rounds {
            let before = acknowledged.each_ref().map(|count| count.load(Ordering::Relaxed));
            let deadline = Instant::now() + PATIENCE;
            let have_written = || {
                let now = acknowledged.iter().map(|count| count.load(Ordering::Relaxed));
                now.zip(before).all(|(now, before)| now >= before + KEYS as u64)
            };
            while !have_written() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            let have_written = have_written();
            // The kill strikes at another moment of the load in each round.
            std::thread::sleep(Duration::from_micros(round as u64 * 7919 % 20_000));
            node.kill();
            node = start(folder.path(), round, &tcp);
            let said = node.log();
            if !have_written || !said.contains("replayed the log of store 's'") {
                is_over.store(true, Ordering::Relaxed);
                panic!("round {round}: the clients have written: {have_written}; the node said: {said}");
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let [over_shm, over_tcp] = acknowledged.map(AtomicU64::into_inner);
    println!("{kind}: {rounds} kills, {over_shm} writes acknowledged over shm and {over_tcp} over tcp");
}

#[test]
fn acknowledged_writes_survive_kills_with_fresh_memory() {
    kill_under_load("chequer", 3);
    kill_under_load("chequer-message", 2);
}

#[test]
#[ignore = "takes 20 s: cargo xtask soak"]
fn soak_acknowledged_writes_survive_a_hundred_kills_with_fresh_memory() {
    kill_under_load("chequer", 100);
    kill_under_load("chequer-message", 100);
}
