//! What CI runs where there is a virtual machine: a value travels over the device, and `doctor` finds it fit.

use super::{Resources, at, node_with_store};
use crate::support::farside;

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn a_value_travels_over_the_device_and_nothing_stays_open() {
    let before = Resources::now();
    let node = node_with_store();
    let url = node.listening();
    assert!(url.starts_with("verbs://"), "{url}");
    at(&url, &["kv", "put", "ada", "lovelace"]).done();
    assert_eq!(at(&url, &["kv", "get", "ada"]).done().out, b"lovelace");
    at(&url, &["kv", "get", "none"]).absent();
    // Values of a page, of a packet, and of many parts.
    for len in [1, 511, 4096, 60_000, 100_000] {
        let value = "x".repeat(len);
        at(&url, &["kv", "put", "long", &value]).done();
        assert!(at(&url, &["kv", "get", "long"]).done().out == value.as_bytes(), "{len} bytes");
    }
    assert_eq!(node.run(["kv", "get", "ada"]).done().out, b"lovelace", "shm sees the same store");
    drop(node);
    before.are_back();
}

#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn doctor_tries_the_device_and_lists_it() {
    let before = Resources::now();
    let ran = farside(["doctor", "--fabric", "verbs", "--json"]).done();
    let verdicts: Vec<(String, String)> = ran
        .text()
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("an object"))
        .map(|check| (check["id"].to_string(), check["verdict"].to_string()))
        .collect();
    for id in ["verbs.library", "verbs.device", "verbs.port", "verbs.gid", "verbs.memlock", "fabric.verbs"] {
        assert!(verdicts.iter().any(|(known, _)| known.contains(id)), "no {id}: {verdicts:?}");
    }
    assert!(verdicts.iter().all(|(_, verdict)| !verdict.contains("fail")), "{verdicts:?}");
    let listed = farside(["info", "--devices"]).done();
    assert!(listed.text().contains(&super::device()) && listed.text().contains("GID "), "{}", listed.text());
    before.are_back();
}
