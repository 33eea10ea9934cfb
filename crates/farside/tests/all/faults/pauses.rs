//! Clients that are stopped or have nothing to do for longer than a node waits for them, nodes that are started again,
//! and connections that break.

use crate::faults::worker::{self, Fates, Role, heard, judge};
use crate::faults::{connect, node_at};
use crate::support::{serve, until};
use farside::local::Client;
use farside::{Error, KvError, Ran, StoreError};
use farside_fabrics::layer::fault::Faults;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// How long a client is stopped.
const STOPPED: Duration = Duration::from_secs(10);

#[test]
fn a_client_that_was_stopped_is_told_what_ran_over_udp() {
    let [mut no, mut yes, _] = stopped("udp", 0.3, 0.0, STOPPED);
    // What left in one datagram has one fate, so a few more times may be needed until both were seen.
    for _ in 0..6 {
        if no > 0 && yes > 0 {
            return;
        }
        let more = stopped("udp", 0.3, 0.0, Duration::ZERO);
        (no, yes) = (no + more[0], yes + more[1]);
    }
    panic!("{no} did not run, {yes} ran, and both should have been seen");
}

#[test]
fn a_client_that_was_stopped_is_told_what_ran_over_tcp() {
    let [no, yes, unknown] = stopped("tcp", 0.0, 0.2, STOPPED);
    assert!(no > 0, "{no} did not run, {yes} ran, of {unknown} nobody knows");
}

/// How many additions were said, at the end, not to have run, to have run, and neither. It is stopped for so long at
/// least, and until its session is over.
fn stopped(scheme: &str, loss: f64, delay: f64, least: Duration) -> [usize; 3] {
    let (node, url) = node_at(&format!("{scheme}://127.0.0.1:0"));
    let role = Role::Operate { url, base: 0, seconds: 60.0, loss, delay };
    let child = worker::start(&role, &node.folder().join("child"), |command| command);
    until("it works", || heard::<u64>(&child, "progress") > 100);
    child.signal(Signal::STOP);
    let stopped = Instant::now();
    until("its session is over", || node.sessions() == 0);
    println!("{scheme}: its session was over after {:?}", stopped.elapsed());
    std::thread::sleep(least.saturating_sub(stopped.elapsed()));
    child.signal(Signal::CONT);
    let strikes: String = heard(&child, "strikes");
    let told: (u32, Vec<Fates>) = heard(&child, "fates");
    for fates in &told.1 {
        let (last, next) = (fates.last.as_ref(), fates.next.as_ref());
        let next = next.unwrap_or_else(|| panic!("its session ended: {fates:?}"));
        assert!(next.ran == "No" && next.words.contains("reconnect"), "{next:?}");
        assert!(last.is_some_and(|last| last.words.contains("reconnect")), "{last:?}");
    }
    let slowest = told.1.iter().filter_map(|fates| fates.next.as_ref()).map(|next| next.took_us).max();
    let counts = judge(&node.url(), &told);
    let [no, yes, unknown] = counts;
    println!(
        "{scheme}: {strikes}; {no} did not run, {yes} ran, of {unknown} nobody knows; the next failed within \
         {slowest:?} us"
    );
    counts
}

#[test]
fn who_was_idle_for_long_goes_on_over_another_session_over_udp() {
    idle_for_long("udp");
}

#[test]
fn who_was_idle_for_long_goes_on_over_another_session_over_tcp() {
    idle_for_long("tcp");
}

fn idle_for_long(scheme: &str) {
    let (node, url) = node_at(&format!("{scheme}://127.0.0.1:0"));
    let pool = connect(&url);
    let mut client = Client::open(&pool, "default").expect("a store");
    client.put(b"key", b"before").expect("stored");
    let go = node.folder().join("go");
    let log = node.folder().join("child");
    let child = worker::start(&Role::Idle { url, go: go.clone() }, &log, |command| command);
    let () = heard(&child, "ready");
    child.signal(Signal::STOP);
    let since = Instant::now();
    until("nobody's session is left", || node.sessions() == 0);
    println!("{scheme}: all sessions were over after {:?}", since.elapsed());

    assert_eq!(client.get(b"key").expect("read").expect("there").value, b"before");
    client.put(b"key", b"after").expect("stored");
    assert_eq!(node.sessions(), 1, "one other session, and no more");
    assert_eq!(client.get(b"key").expect("read").expect("there").value, b"after");

    std::fs::write(go, b"").expect("a file");
    child.signal(Signal::CONT);
    let () = heard(&child, "well");
}

#[test]
fn a_node_that_is_started_again_with_its_memory_is_the_same_store() {
    for scheme in ["udp", "tcp"] {
        started_again(scheme, true);
    }
}

#[test]
fn a_node_that_is_started_again_without_its_memory_is_not_taken_for_the_store() {
    for scheme in ["udp", "tcp"] {
        started_again(scheme, false);
    }
}

fn started_again(scheme: &str, with_memory: bool) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("memory").display().to_string();
    let socket = folder.path().join("node.sock");
    let node = |listen: &str, is_new: bool, log: &str| {
        let mut arguments = vec!["--memory", "32MiB", "--listen", listen];
        if with_memory {
            arguments.extend(["--memory-file", &file]);
        }
        if is_new {
            arguments.extend(["--store", "default"]);
        }
        let process = serve(&socket, &arguments, folder.path().join(log));
        assert!(process.line().contains("serves"));
        process
    };
    let mut first = node(&format!("{scheme}://127.0.0.1:0"), true, "first");
    let info = connect(&format!("shm:{}", socket.display())).info().expect("it serves");
    let url = info.listening[0].clone();
    let pool = connect(&url);
    let (mut local, client) =
        (Client::open(&pool, "default").expect("a store"), pool.open("default").expect("a store"));
    local.put(b"key", b"value").expect("stored");
    first.kill();
    let error = local.get(b"key").expect_err("nobody serves");
    assert!(error.ran() == Ran::No || matches!(error, KvError::Fabric(_)), "{error}");
    println!("{scheme}: {error}");

    let _second = node(&url, !with_memory, "second");
    if with_memory {
        // The client's own thread may only now hear of it.
        let heard = client.get("key").wait().or_else(|_| client.get("key").wait());
        assert_eq!(heard.expect("read").expect("there").value, b"value");
        let heard = local.get(b"key").map(|item| item.map(|item| item.value.to_vec()));
        let heard = heard.or_else(|_| local.get(b"key").map(|item| item.map(|item| item.value.to_vec())));
        assert_eq!(heard.expect("read").as_deref(), Some(&b"value"[..]));
        return;
    }
    until("it is told", || {
        let told = local.get(b"key").map(drop);
        assert!(told.is_err(), "another store is not taken for its own");
        matches!(told, Err(KvError::Store(StoreError::Gone(reason))) if reason.contains("was replaced by"))
    });
    until("it is told", || {
        let told = client.get("key").wait();
        assert!(told.is_err(), "another store is not taken for its own");
        let Err(Error::Kv(KvError::Store(StoreError::Gone(reason)))) = told else { return false };
        reason.contains("was replaced by")
    });
}

#[test]
fn who_is_reset_goes_on_over_another_connection() {
    for scheme in ["udp", "tcp"] {
        let (_node, url) = node_at(&format!("{scheme}://127.0.0.1:0"));
        let faults = Faults { reset: 0.003, seed: 5, ..Faults::default() };
        let pool = connect(&url).with_faults(faults).expect("such faults can be");
        let open = || -> Result<_, Error> { Ok((Client::open(&pool, "default")?, pool.open("default")?)) };
        // A reset may strike while it opens.
        let (mut local, client) = (0..10).find_map(|_| open().ok()).expect("some open");
        let (mut failed, mut done) = ([0u64; 3], 0u64);
        for number in 0..2000u64 {
            for is_local in [true, false] {
                let value = number.to_le_bytes();
                let key: &[u8] = if is_local { b"local" } else { b"client" };
                let put = match is_local {
                    true => local.put(key, &value).map_err(Error::Kv),
                    false => client.put(key, value).wait(),
                };
                match put {
                    Ok(()) => done += 1,
                    Err(error) => failed[error.ran() as usize] += 1,
                }
            }
        }
        let strikes = pool.strikes().expect("it has faults");
        println!("{scheme}: {done} puts, {failed:?} failed (no, yes, unknown); {strikes}");
        assert!(strikes.resets > 1, "{strikes}");
        assert!(
            done > 3000 && failed.iter().sum::<u64>() <= strikes.resets,
            "at most one a reset: {failed:?}"
        );
        let others = connect(&url);
        let mut other = Client::open(&others, "default").expect("a store");
        for key in [&b"local"[..], b"client"] {
            assert!(other.get(key).expect("read").is_some());
        }
    }
}
