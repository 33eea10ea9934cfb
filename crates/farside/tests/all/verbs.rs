//! The command line over an RDMA device. `cargo xtask verbs` runs these tests in a virtual machine with Soft-RoCE, and
//! `cargo xtask verbs --here` on a device of this machine.
//!
//! The tests run one at a time, since they count what is open at the device.
//! Invariant: a test leaves as many queue pairs, completion queues and regions as it found.

mod attacks;
mod deaths;
mod litmus;
mod quick;
mod refusals;
mod systems;
mod unplugged;

use crate::support::{Node, Ran, command, run_within, until_within};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time limit of a command. In the virtual machine, commands are up to a hundred times slower.
const PATIENCE: Duration = Duration::from_secs(300);

/// Returns the name of the device under test.
fn device() -> String {
    std::env::var("FARSIDE_VERBS_DEVICE").expect("the variable names the device, as `cargo xtask verbs` does")
}

/// Waits until `is_so` returns true. `what` describes the condition.
#[track_caller]
fn until(what: &str, is_so: impl FnMut() -> bool) {
    until_within(PATIENCE, what, is_so);
}

/// Numbers of queue pairs, completion queues, regions and domains that are open at the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Resources(BTreeMap<String, u64>);

impl Resources {
    /// Reads the kernel's numbers, of all processes.
    pub(crate) fn now() -> Resources {
        let shown = std::process::Command::new("rdma").args(["resource", "show"]).output().expect("iproute2");
        let text = String::from_utf8(shown.stdout).expect("text");
        let device = device();
        let line =
            text.lines().find(|line| line.contains(&format!(" {device}:"))).expect("the device is listed");
        let (_, counts) = line.split_once(&format!("{device}: ")).expect("counts");
        let words: Vec<&str> = counts.split_whitespace().collect();
        let of_kind = |pair: &[&str]| (pair[0].to_owned(), pair[1].parse().expect("a number"));
        let all: BTreeMap<String, u64> = words.chunks_exact(2).map(of_kind).collect();
        Resources(
            all.into_iter().filter(|(kind, _)| ["pd", "cq", "qp", "mr", "srq"].contains(&&**kind)).collect(),
        )
    }

    fn queue_pairs(&self) -> u64 {
        self.0["qp"]
    }

    /// Waits until as much is open as before.
    #[track_caller]
    pub(crate) fn are_back(&self) {
        let mut now = Resources::now();
        for _ in 0..50 {
            if now == *self {
                break;
            }
            std::thread::sleep(Duration::from_millis(200));
            now = Resources::now();
        }
        println!("open at the device: {self} before, {now} after");
        assert_eq!(now, *self, "not all is closed at the device");
    }
}

impl std::fmt::Display for Resources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut between = "";
        for (kind, count) in &self.0 {
            write!(f, "{between}{count} {kind}")?;
            between = ", ";
        }
        Ok(())
    }
}

/// Who runs the atomics of a node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Atomic {
    /// The node's engine.
    Engine,
    /// The node's NIC.
    Nic,
}

/// Starts a node over the device. `arguments` follow those that choose the fabric.
fn node(atomic: Atomic, arguments: &[&str]) -> Node {
    let listen = format!("verbs://{}:0?host=127.0.0.1", device());
    let mut all = vec!["--listen", &*listen];
    all.extend((atomic == Atomic::Nic).then_some("--nic-atomics"));
    all.extend(arguments);
    Node::with(&all)
}

/// A node with a store `default`, and with memory for the store of a benchmark.
fn node_with_store() -> Node {
    node(Atomic::Engine, &["--memory", "256MiB", "--store", "default", "--quota", "48MiB"])
}

/// Runs `farside ARGUMENTS --pool URL`.
#[track_caller]
fn at(url: &str, arguments: &[&str]) -> Ran {
    let mut command = command();
    command.args(arguments).args(["--pool", url]);
    run_within(PATIENCE, command, b"")
}

/// Runs a benchmark whose values are verified. Asserts that it did something, and met no error and no violation.
#[track_caller]
fn verified(url: &str, arguments: &[&str]) -> serde_json::Value {
    let mut all = vec!["bench"];
    all.extend(arguments);
    // A benchmark of latches always checks the objects that it reads.
    all.extend((arguments[0] != "latch").then_some("--verify"));
    all.extend(["--json", "--warm-up", "0s"]);
    let report = at(url, &all).done().json();
    let kinds = report["operations"].as_object().expect("each kind of operation");
    let done: u64 = kinds.values().filter_map(|kind| kind["count"].as_u64()).sum();
    assert!(done > 0, "{report}");
    for fault in ["errors", "violations"] {
        assert_eq!(report[fault].as_u64().unwrap_or(0), 0, "{fault}: {report}");
    }
    report
}

/// Puts and gets a value, until it works.
#[track_caller]
fn works_again(url: &str) {
    until("a client works", || {
        let mut put = command();
        put.args(["kv", "put", "again", "works", "--pool", url]);
        run_within(PATIENCE, put, b"").code == Some(0)
    });
    assert_eq!(at(url, &["kv", "get", "again"]).done().out, b"works");
}
