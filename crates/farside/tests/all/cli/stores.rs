//! Commands that create, list, rebuild and drop stores, and that describe a store or a node.

use crate::cli::{KIB, bytes};
use crate::support::{Node, Process, command, until};

#[test]
fn stores_are_created_listed_and_dropped() {
    let node = Node::with(&["--memory", "64MiB"]);
    assert!(node.run(["store", "list"]).done().out.is_empty());
    node.run(["kv", "get", "k"]).refused("create it with 'farside store create default'");
    node.run(["store", "create", "a-B_9.z", "--quota", "8MiB"]).done();
    node.run(["store", "create", "small", "--quota", "2MiB", "--items", "1000", "--collision-free"]).done();
    let listed = node.run(["store", "list"]).done();
    let expected = "a-B_9.z\tprism-kv\t8.0 MiB\ttable 1, of 32768 slots\n\
                    small\tprism-kv\t2.0 MiB\ttable 1, of 4096 slots\n";
    assert_eq!(listed.text(), expected);
    let listed = node.run(["store", "list", "--json"]).done();
    let stores: Vec<serde_json::Value> =
        listed.text().lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(stores.len(), 2);
    assert_eq!((&stores[0]["name"], &stores[0]["kind"]), (&"a-B_9.z".into(), &"prism-kv".into()));
    assert_eq!(stores[0]["quota_bytes"], 8 << 20);
    assert_eq!(stores[1]["parameters"]["placement"], "permuted");
    for (store, hidden) in stores.iter().zip(["secret", "region", "table_at", "incarnation"]) {
        assert!(store.get(hidden).is_none() && store["parameters"].get("seed").is_none(), "{store}");
    }

    node.run(["kv", "put", "k", "v", "--store", "small"]).done();
    node.run(["kv", "get", "k", "--store", "a-B_9.z"]).absent();
    node.run(["store", "create", "small", "--quota", "2MiB", "--items", "1"])
        .refused("there is a store 'small' already");
    assert_eq!(node.run(["kv", "get", "k", "--store", "small"]).done().out, b"v");
    node.run(["store", "drop", "small"]).done();
    node.run(["store", "drop", "small"]).refused("there is no store 'small': the node has a-B_9.z");
    node.run(["kv", "get", "k", "--store", "small"])
        .refused("farside: there is no store 'small'; the node has: a-B_9.z; create it with");
    let info = node.run(["info", "--json"]).done().json();
    assert_eq!(info["stores"], serde_json::json!([stores[0]]), "'info' and 'store list' differ");
    node.run(["store", "create", "small", "--quota", "2MiB", "--items", "1000"]).done();
    node.run(["kv", "get", "k", "--store", "small"]).absent();
}

#[test]
fn a_pilaf_store_serves_the_same_commands_or_refuses_them() {
    let node = Node::with(&["--memory", "64MiB"]);
    node.run(["store", "create", "p", "--kind", "pilaf", "--quota", "8MiB", "--items", "1000"]).done();
    assert_eq!(node.run(["store", "list"]).done().text(), "p\tpilaf\t8.0 MiB\n");
    let kv = |arguments: &[&str]| node.run(arguments.iter().copied().chain(["--store", "p"]));
    kv(&["kv", "get", "k"]).absent();
    kv(&["kv", "put", "k", "v"]).done();
    assert_eq!(kv(&["kv", "get", "k"]).done().out, b"v");
    assert_eq!(kv(&["kv", "stat", "--json"]).done().json()["live_buffers"], 1);
    let traced = kv(&["kv", "get", "k", "--trace"]).done();
    assert_eq!(traced.out, b"v");
    kv(&["kv", "put", "k", &"v".repeat(60 * KIB)])
        .refused("at most 61424 are possible in a store of this kind");
    kv(&["kv", "dump"])
        .refused("a pilaf store does not support iteration over all keys: use a prism-kv store");
    kv(&["kv", "del", "k"]).done();
    kv(&["kv", "del", "k"]).absent();
    node.run(["store", "create", "q", "--kind", "cuckoo"]).refused("use one of prism-kv, pilaf");
}

#[test]
fn a_store_is_rebuilt_on_request_and_by_itself() {
    let node = Node::with(&["--memory", "64MiB"]);
    node.run(["store", "create", "s", "--quota", "16MiB", "--items", "100"]).done();
    node.run(["kv", "put", "k", "v", "--store", "s"]).done();
    let rebuilt = node.run(["store", "rebuild", "s", "--items", "10000"]).done();
    assert_eq!(rebuilt.text(), "store 's' has table 2, of 65536 slots\n");
    assert_eq!(node.run(["kv", "get", "k", "--store", "s"]).done().out, b"v");
    let stat = node.run(["kv", "stat", "--store", "s", "--json"]).done().json();
    assert_eq!((&stat["epoch"], &stat["moved_percent"]), (&2.into(), &serde_json::Value::Null));
    assert!(node.run(["kv", "stat", "--store", "s"]).done().text().contains("table 2, of 65536 slots"));
    node.run(["store", "rebuild", "s"]).done();
    assert!(node.run(["store", "list"]).done().text().contains("table 3, of 256 slots"));

    node.run(["store", "rebuild", "s", "--items", "100000000"])
        .refused("drop another store, or serve more --memory");
    node.run(["store", "rebuild", "s", "--items", "99999999999999"]).refused("give at most");
    node.run(["store", "rebuild", "nobody"]).refused("there is no store 'nobody'");
    assert_eq!(node.run(["kv", "get", "k", "--store", "s"]).done().out, b"v");

    // More keys than the table has slots.
    let lines: String = (0..5000).map(|n| format!("key {n}\tvalue {n}\n")).collect();
    node.run_with(["kv", "load", "-", "--store", "s"], lines.as_bytes()).done();
    assert_eq!(node.run(["kv", "get", "key 4999", "--store", "s"]).done().out, b"value 4999");
    let stat = node.run(["kv", "stat", "--store", "s", "--json"]).done().json();
    assert!(stat["epoch"].as_u64() > Some(3), "{stat}");
}

#[test]
fn many_stores_are_listed() {
    let node = Node::with(&["--memory", "800MiB"]);
    let longest = |number: usize| format!("{number:0>64}");
    let mut made = 0;
    // Until the node refuses.
    let refused = loop {
        let ran = node.run(["store", "create", &longest(made), "--quota", "2MiB", "--items", "1"]);
        if ran.code != Some(0) {
            break ran;
        }
        made += 1;
    };
    refused.refused("drop one");
    assert_eq!(made, 255);
    while made > 190 {
        made -= 1;
        node.run(["store", "drop", &longest(made)]).done();
    }
    assert_eq!(node.run(["store", "list"]).done().text().lines().count(), made);
    node.run(["kv", "get", "k"]).refused("there is no store 'default'; the node has: 0");
}

#[test]
fn stat_and_info_agree_in_text_and_json() {
    let node = Node::start();
    node.run_with(["kv", "put", "k"], &bytes(100 * KIB, 3)).done();
    let stat = node.run(["kv", "stat", "--json"]).done().json();
    assert_eq!(stat["quota_bytes"], 48 << 20);
    for number in ["table_bytes", "granted_bytes", "buffer_segment_bytes", "live_buffers", "live_bytes"] {
        assert!(stat[number].as_u64().is_some_and(|number| number > 0), "{number}: {stat}");
    }
    for number in ["free_buffers", "free_bytes", "retired_buffers", "parked_buffers"] {
        assert!(stat[number].is_u64(), "{number}: {stat}");
    }
    assert_eq!(stat["delaying_pids"], serde_json::json!([]));
    assert_eq!(stat["scans"], 0);
    let people = node.run(["kv", "stat"]).done();
    assert!(people.text().contains("quota") && people.text().contains("48.0 MiB"), "{}", people.text());
    assert_eq!(leak_scans(people.text()), "0");

    let info = node.run(["info", "--json"]).done().json();
    assert_eq!(info["pid"], node.process.pid());
    assert_eq!(info["memory_bytes"], 96 << 20);
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    for number in ["incarnation", "unassigned_bytes", "page_size", "sessions"] {
        assert!(info[number].as_u64().is_some_and(|number| number > 0), "{number}: {info}");
    }
    for number in ["reclaimed_buffers", "scanned_buffers"] {
        assert!(info[number].is_u64(), "{number}: {info}");
    }
    let people = node.run(["info"]).done();
    assert!(people.text().contains(&node.process.pid().to_string()), "{}", people.text());
    assert!(people.text().contains("default"), "{}", people.text());
}

#[test]
fn stat_counts_the_scan_after_a_killed_client() {
    let node = Node::start();
    let mut client = command();
    client.args(["kv", "stat", "--watch", "1s", "--pool", &node.url()]);
    let mut client = Process::start(client, node.folder().join("client.log"));
    // A line shows that it is connected. The count of sessions would not: it may have former clients' sessions.
    client.line();
    client.kill();
    until("the scan is complete", || node.run(["kv", "stat", "--json"]).done().json()["scans"] == 1);
    assert_eq!(leak_scans(node.run(["kv", "stat"]).done().text()), "1");
    let watched = node.run(["kv", "stat", "--watch", "100ms", "--count", "1", "--json"]).done().json();
    assert_eq!(watched["stat"]["scans"], 1);
}

#[test]
fn statistics_of_a_node_without_the_newer_figures_are_valid() {
    let stat = farside::StoreStat { live_buffers: 7, ..farside::StoreStat::default() };
    let mut json = serde_json::to_value(&stat).expect("plain data");
    for newer in ["moved_percent", "scans"] {
        json.as_object_mut().and_then(|figures| figures.remove(newer)).expect(newer);
    }
    assert_eq!(serde_json::from_value::<farside::StoreStat>(json).expect("an older form"), stat);
}

/// The number in the row *leak scans* of `kv stat`.
fn leak_scans(stat: &str) -> &str {
    let row = stat.lines().find_map(|line| line.strip_prefix("leak scans")).expect("such a row");
    row.split_whitespace().next().expect("a number")
}
