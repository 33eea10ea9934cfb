//! The device's interface goes down and comes up again, under load.

use super::{Resources, at, node_with_store, works_again};
use crate::support::{Process, command};
use std::process::Command;
use std::time::Duration;

/// The interface below the device in the virtual machine.
const INTERFACE: &str = "farside0";

/// An interface that is down until this drops.
struct Down;

impl Down {
    fn now() -> Down {
        ip(&["link", "set", INTERFACE, "down"]);
        Down
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        ip(&["link", "set", INTERFACE, "up"]);
    }
}

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().expect("iproute2");
    assert!(status.success(), "ip {arguments:?}");
}

#[test]
#[ignore = "takes an RDMA device of its own: cargo xtask verbs"]
fn a_link_that_was_down_is_used_again_and_nothing_is_lost() {
    let node = node_with_store();
    let url = node.listening();
    for number in 0..10 {
        at(&url, &["kv", "put", &format!("key{number}"), "value"]).done();
    }
    let before = Resources::now();
    let mut bench = command();
    bench.args([
        "bench",
        "ycsb",
        "--pool",
        &url,
        "--workload",
        "a",
        "--records",
        "200",
        "--verify",
        "--seconds",
        "8",
    ]);
    let mut client = Process::start(bench, node.folder().join("client.log"));
    std::thread::sleep(Duration::from_secs(3));
    let down = Down::now();
    std::thread::sleep(Duration::from_secs(2));
    drop(down);
    // The client either goes on, or it reports what it met.
    let code = client.ended();
    println!("a client under load ended with {code:?}: {}", client.log());
    assert!(code == Some(0) || client.log().contains("farside: "), "{code:?}: {}", client.log());
    works_again(&url);
    for number in 0..10 {
        assert_eq!(at(&url, &["kv", "get", &format!("key{number}")]).done().out, b"value");
    }
    before.are_back();
}

#[test]
#[ignore = "takes an RDMA device of its own: cargo xtask verbs"]
fn a_port_that_is_down_is_named_with_the_remedy() {
    let device = super::device();
    let down = Down::now();
    let listen = format!("verbs://{device}:0?host=127.0.0.1");
    crate::support::farside([
        "serve",
        "--memory",
        "16MiB",
        "--socket",
        "/tmp/farside-down.sock",
        "--listen",
        &listen,
    ])
    .refused("is down; set its interface up");
    let ran = crate::support::farside(["doctor", "--fabric", "verbs"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.text().contains("ip link set INTERFACE up"), "{}", ran.text());
    drop(down);
    crate::support::farside(["doctor", "--fabric", "verbs"]).done();
}
