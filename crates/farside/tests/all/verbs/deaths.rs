//! Clients and nodes that are killed: what they had open at the device is closed, and nothing else is lost.

use super::{Atomic, Resources, at, node, node_with_store, until, works_again};
use crate::support::{Process, command, serve};
use rustix::process::Signal;

/// Starts a client that works until it is killed.
fn client(url: &str, folder: &std::path::Path, number: usize) -> Process {
    let mut command = command();
    command.args(["bench", "ycsb", "--pool", url, "--workload", "a", "--records", "200", "--seconds", "600"]);
    Process::start(command, folder.join(format!("client-{number}.log")))
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn killed_clients_leave_nothing_at_the_device() {
    // A killed benchmark leaves its store of 107 MiB.
    let node = node(Atomic::Engine, &["--memory", "768MiB", "--store", "default", "--quota", "48MiB"]);
    let url = node.listening();
    at(&url, &["kv", "put", "kept", "value"]).done();
    until("the client's session is over", || node.sessions() == 0);
    let (before, descriptors) = (Resources::now(), node.descriptors());
    for round in 0..3 {
        let mut clients: Vec<Process> = (0..2).map(|number| client(&url, node.folder(), number)).collect();
        // Each client has a queue pair, and so has the node for each.
        until("all clients are connected", || {
            let ended = clients.iter_mut().position(Process::has_ended);
            assert!(ended.is_none(), "{}", ended.map_or_else(String::new, |at| clients[at].log()));
            Resources::now().queue_pairs() >= before.queue_pairs() + 4
        });
        std::thread::sleep(std::time::Duration::from_millis(500 * round));
        clients.iter_mut().for_each(Process::kill);
        until("the sessions are over", || node.sessions() == 0);
        before.are_back();
    }
    assert_eq!(at(&url, &["kv", "get", "kept"]).done().out, b"value");
    node.assert_well(descriptors);
    before.are_back();
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn a_stopped_client_delays_nobody_and_works_when_it_continues() {
    let node = node_with_store();
    let url = node.listening();
    let stopped = client(&url, node.folder(), 0);
    until("the client is connected", || node.sessions() == 1);
    stopped.signal(Signal::STOP);
    for number in 0..20 {
        at(&url, &["kv", "put", &format!("key{number}"), "value"]).done();
    }
    stopped.signal(Signal::CONT);
    assert_eq!(at(&url, &["kv", "get", "key7"]).done().out, b"value");
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn a_killed_node_is_reported_and_one_with_its_memory_is_used_again() {
    let before = Resources::now();
    let folder = tempfile::tempdir().expect("a folder");
    let memory = folder.path().join("memory").display().to_string();
    let socket = folder.path().join("socket");
    let start = |listen: &str| {
        let store = ["--memory", "256MiB", "--store", "default", "--quota", "48MiB"];
        let arguments = [&store[..], &["--memory-file", &memory, "--listen", listen]].concat();
        let node = serve(&socket, &arguments, folder.path().join("log"));
        node.line();
        let url = node.line().split_once(" at ").expect("an engine").1.trim().to_owned();
        (node, url)
    };
    let (mut node, url) = start(&format!("verbs://{}:0?host=127.0.0.1", super::device()));
    at(&url, &["kv", "put", "kept", "value"]).done();
    let alone = Resources::now();
    let mut client = client(&url, folder.path(), 0);
    until("the client is connected", || {
        assert!(!client.has_ended(), "{}", client.log());
        Resources::now().queue_pairs() >= alone.queue_pairs() + 2
    });
    std::thread::sleep(std::time::Duration::from_secs(2));
    node.kill();
    assert_ne!(client.ended(), Some(0), "a client whose node is gone reports it");
    let log = client.log();
    let reported = log.lines().find(|line| line.starts_with("farside: ")).unwrap_or_else(|| panic!("{log}"));
    println!("the client reports: {reported}");
    before.are_back();
    let port = url.rsplit(':').next().expect("a port");
    let (node, again) = start(&format!("verbs://{}:{port}?host=127.0.0.1", super::device()));
    assert_eq!(again, url);
    assert_eq!(at(&url, &["kv", "get", "kept"]).done().out, b"value");
    works_again(&url);
    drop(node);
    before.are_back();
}
