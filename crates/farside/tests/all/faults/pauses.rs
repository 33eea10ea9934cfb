//! Clients that are stopped or idle for longer than the node keeps a silent session, nodes that restart, and
//! connections that break.

use crate::faults::worker::{self, Fates, Role, await_report, judge};
use crate::faults::{connect, node_at};
use crate::support::{serve, until};
use farside::local::Client;
use farside::{Error, KvError, Ran, StoreError};
use farside_fabrics::layer::fault::Faults;
use rustix::process::Signal;
use std::time::{Duration, Instant};

/// Time for which a client is stopped.
const STOPPED: Duration = Duration::from_secs(10);

#[test]
fn a_stopped_client_learns_which_operations_ran_over_udp() {
    let [mut no, mut yes, _] = stopped("udp", 0.3, 0.0, STOPPED);
    // Requests in one datagram share its fate, so several runs may be necessary to see both outcomes.
    for _ in 0..6 {
        if no > 0 && yes > 0 {
            return;
        }
        let more = stopped("udp", 0.3, 0.0, Duration::ZERO);
        (no, yes) = (no + more[0], yes + more[1]);
    }
    panic!("{no} did not run, {yes} ran; both outcomes must occur");
}

#[test]
fn a_stopped_client_learns_which_operations_ran_over_tcp() {
    let [no, yes, unknown] = stopped("tcp", 0.0, 0.2, STOPPED);
    assert!(no > 0, "{no} did not run, {yes} ran, {unknown} are unknown");
}

/// Stops a client for at least `least`, and until its session is over. Returns how many of the tasks' last additions
/// were reported as not run, as run, and as unknown, in this order.
fn stopped(scheme: &str, loss: f64, delay: f64, least: Duration) -> [usize; 3] {
    let (node, url) = node_at(&format!("{scheme}://127.0.0.1:0"));
    let role = Role::Operate { url, base: 0, seconds: 60.0, loss, delay };
    let child = worker::start(&role, &node.folder().join("child"), |command| command);
    until("the client makes progress", || await_report::<u64>(&child, "progress") > 100);
    child.signal(Signal::STOP);
    let stopped = Instant::now();
    until("the client's session is over", || node.sessions() == 0);
    println!("{scheme}: the client's session was over after {:?}", stopped.elapsed());
    std::thread::sleep(least.saturating_sub(stopped.elapsed()));
    child.signal(Signal::CONT);
    let strikes: String = await_report(&child, "strikes");
    let reported: (u32, Vec<Fates>) = await_report(&child, "fates");
    for fates in &reported.1 {
        let (last, next) = (fates.last.as_ref(), fates.next.as_ref());
        let next = next.unwrap_or_else(|| panic!("the session did not end: {fates:?}"));
        assert!(next.ran == "No" && next.words.contains("reconnect"), "{next:?}");
        assert!(last.is_some_and(|last| last.words.contains("reconnect")), "{last:?}");
    }
    let slowest = reported.1.iter().filter_map(|fates| fates.next.as_ref()).map(|next| next.took_us).max();
    let counts = judge(&node.url(), &reported);
    let [no, yes, unknown] = counts;
    println!(
        "{scheme}: {strikes}; {no} did not run, {yes} ran, {unknown} are unknown; the next operations failed within \
         {slowest:?} us"
    );
    counts
}

#[test]
fn an_idle_client_continues_over_another_session_over_udp() {
    idle_for_long("udp");
}

#[test]
fn an_idle_client_continues_over_another_session_over_tcp() {
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
    let () = await_report(&child, "ready");
    child.signal(Signal::STOP);
    let since = Instant::now();
    until("no session is left", || node.sessions() == 0);
    println!("{scheme}: all sessions were over after {:?}", since.elapsed());

    assert_eq!(client.get(b"key").expect("read").expect("present").value, b"before");
    client.put(b"key", b"after").expect("stored");
    assert_eq!(node.sessions(), 1, "exactly one new session");
    assert_eq!(client.get(b"key").expect("read").expect("present").value, b"after");

    std::fs::write(go, b"").expect("a file");
    child.signal(Signal::CONT);
    let () = await_report(&child, "well");
}

#[test]
fn a_node_restarted_with_its_memory_has_the_same_store() {
    for scheme in ["udp", "tcp"] {
        started_again(scheme, true);
    }
}

#[test]
fn a_node_restarted_without_its_memory_has_another_store() {
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
    let info = connect(&format!("shm:{}", socket.display())).info().expect("the node serves");
    let url = info.listening[0].clone();
    let pool = connect(&url);
    let (mut local, client) =
        (Client::open(&pool, "default").expect("a store"), pool.open("default").expect("a store"));
    local.put(b"key", b"value").expect("stored");
    first.kill();
    let error = local.get(b"key").expect_err("the node is dead");
    assert!(error.ran() == Ran::No || matches!(error, KvError::Fabric(_)), "{error}");
    println!("{scheme}: {error}");

    let _second = node(&url, !with_memory, "second");
    if with_memory {
        // The client may learn only now that its session is over, so the first get may fail.
        let got = client.get("key").wait().or_else(|_| client.get("key").wait());
        assert_eq!(got.expect("read").expect("present").value, b"value");
        let got = local.get(b"key").map(|item| item.map(|item| item.value.to_vec()));
        let got = got.or_else(|_| local.get(b"key").map(|item| item.map(|item| item.value.to_vec())));
        assert_eq!(got.expect("read").as_deref(), Some(&b"value"[..]));
        return;
    }
    until("the local client reports that the store is another one", || {
        let got = local.get(b"key").map(drop);
        assert!(got.is_err(), "a client does not switch to another store");
        matches!(got, Err(KvError::Store(StoreError::Gone(reason))) if reason.contains("was replaced by"))
    });
    until("the client reports that the store is another one", || {
        let got = client.get("key").wait();
        assert!(got.is_err(), "a client does not switch to another store");
        let Err(Error::Kv(KvError::Store(StoreError::Gone(reason)))) = got else { return false };
        reason.contains("was replaced by")
    });
}

#[test]
fn a_client_continues_over_another_connection_after_a_reset() {
    for scheme in ["udp", "tcp"] {
        let (_node, url) = node_at(&format!("{scheme}://127.0.0.1:0"));
        let faults = Faults { reset: 0.003, seed: 5, ..Faults::default() };
        let pool = connect(&url).with_faults(faults).expect("the fabric can have these faults");
        let open = || -> Result<_, Error> { Ok((Client::open(&pool, "default")?, pool.open("default")?)) };
        // A reset may strike while the clients open.
        let (mut local, client) = (0..10).find_map(|_| open().ok()).expect("one of ten attempts");
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
        let strikes = pool.strikes().expect("the pool has faults");
        println!("{scheme}: {done} puts, {failed:?} failed (no, yes, unknown); {strikes}");
        assert!(strikes.resets > 1, "{strikes}");
        assert!(
            done > 3000 && failed.iter().sum::<u64>() <= strikes.resets,
            "at most one failure per reset: {failed:?}"
        );
        let others = connect(&url);
        let mut other = Client::open(&others, "default").expect("a store");
        for key in [&b"local"[..], b"client"] {
            assert!(other.get(key).expect("read").is_some());
        }
    }
}
