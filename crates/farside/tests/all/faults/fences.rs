//! A client that is stopped, fenced, and continued: it is refused and told so, and nothing of it runs any more.

use crate::faults::worker::{self, Role, await_report, count_of, words_of};
use crate::faults::{connect, listening, node_at};
use crate::support::{Node, until};
use farside_fabrics::executor::block_on;
use farside_fabrics::shm::is_stopped;
use farside_remote::{FabricError, NodeId};
use farside_systems::identity::fence;
use rustix::process::Signal;
use std::rc::Rc;

const NONCE: u64 = 0xf00d_0000_0000_0001;

#[test]
fn a_stopped_holder_is_fenced_over_shm() {
    let node = Node::with(&[
        "--memory",
        "96MiB",
        "--store",
        "default",
        "--quota",
        "48MiB",
        "--listen",
        "tcp://127.0.0.1:0",
    ]);
    listening(&node);
    // A process is nearly always in a turn if its turns are long, and seldom if they are short.
    let is_delayed = |round: u64, additions: u64| {
        let nonce = NONCE + 16 * round + 1024 * additions;
        stopped_and_fenced(&node, &node.url(), nonce, additions)
    };
    let short = (0..4).filter(|&round| is_delayed(round, 1)).count();
    let long = (0..16).position(|round| is_delayed(round, 20_000)).expect("a process is stopped in a turn");
    println!("shm: {short} of 4 processes were stopped in a short turn, and number {long} in a long one");
}

#[test]
fn a_stopped_holder_is_fenced_over_udp() {
    let (node, url) = node_at("udp://127.0.0.1:0");
    assert!(!stopped_and_fenced(&node, &url, NONCE, 1));
}

#[test]
fn a_stopped_holder_is_fenced_over_tcp() {
    let (node, url) = node_at("tcp://127.0.0.1:0");
    assert!(!stopped_and_fenced(&node, &url, NONCE, 1));
}

/// Stops, fences and continues a client of `url`. Returns whether the stopped process delayed the fence. In this case
/// the fence is repeated after the process has continued.
fn stopped_and_fenced(node: &Node, url: &str, nonce: u64, additions: u64) -> bool {
    let child = worker::start(
        &Role::Hold { url: url.into(), nonce, additions },
        &node.folder().join("child"),
        |command| command,
    );
    assert!(await_report::<u64>(&child, "progress") >= 100);
    child.signal(Signal::STOP);
    until("the client is stopped", || is_stopped(child.pid()));
    let endpoint = Rc::new(connect(url).endpoint_here().expect("a session"));
    let words = words_of(&endpoint);
    let fence = || block_on(&endpoint, fence(&*endpoint, NodeId(0), &words, nonce));
    let fenced = fence();
    let is_delayed = fenced.is_err();
    if let Err(error) = fenced {
        let named = format!("process {} is stopped", child.pid());
        assert!(matches!(&error, FabricError::Refused(reason) if reason.contains(&named)), "{error}");
        child.signal(Signal::CONT);
        fence().expect("the client's turn has ended");
    }
    let count = count_of(&endpoint, &words, 0);
    if !is_delayed {
        child.signal(Signal::CONT);
    }
    let (added, is_fenced, ran, reason): (u64, bool, String, String) = await_report(&child, "refused");
    println!("{url}: after {added} additions, ran: {ran}: {reason}");
    assert!(is_fenced && reason.contains("reconnect as a new client"), "{reason}");
    assert_eq!(await_report::<(bool, String)>(&child, "next"), (true, "No".into()));
    let (is_fenced, again): (bool, String) = await_report(&child, "again");
    assert!(is_fenced && again.contains("new nonce"), "{again}");
    assert!(await_report::<bool>(&child, "new"));
    assert_eq!(count_of(&endpoint, &words, 0), count, "nothing of the fenced client has run since");
    is_delayed
}
