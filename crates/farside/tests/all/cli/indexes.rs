//! `index`: keys in order, over every fabric and several nodes, and wrong input.

use crate::support::{Node, Process, Ran, command, farside, serve, until};
use rustix::process::Signal;
use std::ffi::OsStr;

/// Starts a node with an index `default` of this kind of keys.
fn node(key_size: &str, value_size: &str) -> Node {
    let node = Node::with(&["--memory", "96MiB", "--listen", "tcp://127.0.0.1:0"]);
    create(&node, "default", key_size, value_size);
    node
}

#[track_caller]
fn create(node: &Node, name: &str, key_size: &str, value_size: &str) {
    let create = ["store", "create", name, "--kind", "smart", "--quota", "24MiB"];
    node.run(create.iter().chain(&["--key-size", key_size, "--value-size", value_size])).done();
}

#[track_caller]
fn scanned(ran: Ran) -> Vec<(String, String)> {
    let ran = ran.done();
    let lines = ran.text().lines().map(|line| line.split_once('\t').expect("a line has a tab"));
    lines.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[test]
fn an_index_is_created_listed_and_dropped_and_wrong_options_are_refused() {
    let node = Node::with(&["--memory", "96MiB"]);
    create(&node, "n", "8", "100");
    create(&node, "s", "string", "1KiB");
    let listed = node.run(["store", "list"]).done();
    let expected = "n\tsmart\t24.0 MiB\tkeys are numbers, values up to 100 B\n\
                    s\tsmart\t24.0 MiB\tkeys are strings, values up to 1.0 KiB\n";
    assert_eq!(listed.text(), expected);
    let parameters =
        |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("JSON")["parameters"].clone();
    let listed = node.run(["store", "list", "--json"]).done();
    let listed: Vec<_> = listed.text().lines().map(parameters).collect();
    assert_eq!((&listed[0]["keys"], &listed[1]["value_max"]), (&"numbers".into(), &1024.into()));
    assert!(node.run(["kv", "stat", "--store", "n"]).done().text().contains("keys are numbers"));

    let create = |options: &[&str]| node.run(["store", "create", "x"].iter().chain(options));
    create(&["--kind", "smart", "--key-size", "7"]).refused("give 8, for numbers of 8 bytes, or string");
    create(&["--kind", "smart", "--value-size", "49KiB"])
        .refused("at most 49152 bytes: give a smaller --value-size");
    create(&["--kind", "smart", "--inline-size", "8KiB"])
        .refused("at most 7168 bytes of a value beside its key, and not 8192: give a smaller --inline-size");
    create(&["--inline-size", "8"]).refused("prism-kv stores have no --inline-size: leave it out");
    create(&["--kind", "sherman", "--inline-size", "8"]).refused("sherman stores have no --inline-size");
    create(&["--kind", "sherman", "--value-size", "2KiB"])
        .refused("at most 1024 bytes: give a smaller --value-size");
    create(&["--kind", "smart", "--value-size", "0"]).refused("is not a size of values");
    create(&["--kind", "smart", "--items", "7"]).refused("smart stores have no --items: leave it out");
    create(&["--kind", "smart", "--collision-free"]).refused("smart stores have no --collision-free");
    create(&["--kind", "smart", "--block-buckets", "4"]).refused("smart stores have no --block-buckets");
    create(&["--key-size", "8"]).refused("prism-kv stores have no --key-size: leave it out");
    create(&["--value-size", "8"]).refused("prism-kv stores have no --value-size: leave it out");
    create(&["--kind", "smart", "--value-size", "7KiB", "--quota", "1MiB"]).refused("give a larger --quota");
    assert_eq!(node.run(["store", "list"]).done().text(), expected, "a refused store was created");

    node.run(["store", "create", "kv", "--quota", "2MiB"]).done();
    node.run(["kv", "get", "k", "--store", "n"])
        .refused("store 'n' is an index, not a key-value store: use 'farside index', or name another store");
    node.run(["index", "get", "1", "--store", "kv"])
        .refused("is a key-value store, not an index: use 'farside kv', or name another store");
    node.run(["index", "get", "1", "--store", "none"]).refused("create it with 'farside store create none'");
    node.run(["store", "drop", "n"]).done();
    node.run(["index", "get", "1", "--store", "n"]).refused("there is no store 'n'");
}

#[test]
fn numbers_are_put_read_scanned_and_deleted_in_order() {
    let node = node("8", "16");
    for (key, value) in [("256", "c"), ("0xff", "b"), ("18446744073709551615", "d"), ("0", "a\tb")] {
        node.run(["index", "put", key, value]).done();
    }
    node.run_with(["index", "put", "300", "-"], b"raw\n\0").done();
    assert_eq!(node.run(["index", "get", "255"]).done().out, b"b");
    assert_eq!(node.run(["index", "get", "0x12c"]).done().out, b"raw\n\0");
    node.run(["index", "get", "7"]).absent();
    let all = "0\ta\\tb\n255\tb\n256\tc\n300\traw\\n\\x00\n18446744073709551615\td\n";
    assert_eq!(node.run(["index", "scan"]).done().text(), all);
    let keys = |arguments: &[&str]| -> Vec<String> {
        let ran = node.run(["index", "scan"].iter().chain(arguments));
        scanned(ran).into_iter().map(|(key, _)| key).collect()
    };
    assert_eq!(keys(&["--from", "0x100", "--limit", "2"]), ["256", "300"]);
    assert_eq!(keys(&["--from", "301"]), ["18446744073709551615"]);
    assert_eq!(keys(&["--limit", "1"]), ["0"]);
    let json = node.run(["index", "scan", "--from", "256", "--limit", "1", "--json"]).done();
    assert_eq!(json.json(), serde_json::json!({"key": "256", "value": "c"}));
    node.run(["index", "put", "255", ""]).done();
    assert_eq!(node.run(["index", "get", "255"]).done().out, b"");
    node.run(["index", "del", "255"]).done();
    node.run(["index", "del", "255"]).absent();
    node.run(["index", "get", "255"]).absent();
    assert_eq!(keys(&["--from", "1", "--limit", "1"]), ["256"]);

    let refused = "is not a key of this store, whose keys are numbers: give 0 to 18446744073709551615";
    for key in ["seven", "-1", "0x", "1.5", "18446744073709551616", ""] {
        node.run(["index", "get", key]).refused(refused);
        node.run(["index", "scan", "--from", key]).refused(refused);
    }
    node.run(["index", "put", "1", &"v".repeat(17)])
        .refused("at most 16 are possible in this store: split it");
    node.run(["index", "scan", "--limit", "0"]).refused("--limit");
    node.run(["index", "put", "1", "@/nowhere"]).refused("could not read /nowhere");
    node.run(["index", "get", "1"]).absent();
}

#[test]
fn strings_are_kept_in_the_order_of_their_bytes() {
    let node = node("string", "64");
    let longest = "k".repeat(128);
    for key in ["b", "a", "ab", "ключ", "7", &longest] {
        node.run(["index", "put", key, key.get(..1).unwrap_or("u")]).done();
    }
    let found = node.run(["index", "scan", "--json"]).done();
    let keys: Vec<String> = found
        .text()
        .lines()
        .map(|line| {
            serde_json::from_str::<serde_json::Value>(line).expect("JSON")["key"]
                .as_str()
                .expect("text")
                .into()
        })
        .collect();
    assert_eq!(keys, ["7", "a", "ab", "b", longest.as_str(), "ключ"]);
    assert_eq!(
        scanned(node.run(["index", "scan", "--from", "aa", "--limit", "1"])),
        [("ab".into(), "a".into())]
    );
    assert_eq!(node.run(["index", "get", &longest]).done().out, b"k");
    for wrong in ["", &"k".repeat(129)] {
        node.run(["index", "put", wrong, "v"]).refused("strings of 1 to 128 bytes");
        node.run(["index", "scan", "--from", wrong]).refused("strings of 1 to 128 bytes");
    }
}

fn lines(count: u64) -> String {
    (0..count).rev().map(|number| format!("{}\tvalue {number}\n", number * 3)).collect()
}

#[test]
fn every_format_preserves_a_dump_in_order() {
    let node = node("8", "32");
    let reported = node.run_with(["index", "load", "-", "--json"], lines(3000).as_bytes()).done().json();
    assert_eq!(reported["keys"], 3000);
    let dumped = node.run(["index", "dump"]).done();
    let pairs: Vec<&str> = dumped.text().lines().collect();
    assert_eq!((pairs.len(), pairs[0], pairs[2999]), (3000, "0\tvalue 0", "8997\tvalue 2999"));
    for (number, format) in ["tsv", "jsonl", "binary"].into_iter().enumerate() {
        let file = node.folder().join(format);
        let dump = ["index", "dump", "--format", format].map(OsStr::new);
        let written =
            node.run(dump.into_iter().chain([file.as_os_str(), OsStr::new("--json")])).done().json();
        assert_eq!(written["keys"], 3000, "{format}");
        node.run(dump.into_iter().chain([file.as_os_str()])).refused("exists already");
        let other = format!("other{number}");
        create(&node, &other, "8", "32");
        let load = ["index", "load", "--store", &other, "--format", format].map(OsStr::new);
        node.run(load.into_iter().chain([file.as_os_str()])).done();
        let again = node.run(["index", "dump", "--store", &other]).done();
        assert!(again.out == dumped.out, "{format}");
        node.run(["store", "drop", &other]).done();
    }
    // Two lines name one number: the later one wins.
    node.run_with(["index", "load", "-"], b"5\told\n0x5\tnew\n").done();
    assert_eq!(node.run(["index", "get", "5"]).done().out, b"new");
    let wrong = node.run_with(["index", "load", "-"], b"10\tv\nten\tv\n11\tv\n");
    wrong.refused("line 2 of -: 'ten' is not a key of this store, whose keys are numbers");
    assert_eq!(node.run(["index", "get", "10"]).done().out, b"v");
    node.run(["index", "get", "11"]).absent();
    let long = format!("12\tv\n13\t{}\n", "v".repeat(33));
    node.run_with(["index", "load", "-"], long.as_bytes()).refused("line 2 of -: the value has 33 bytes");
    assert_eq!(node.run(["index", "get", "12"]).done().out, b"v");
}

#[test]
fn an_interrupted_dump_goes_on_after_its_last_key() {
    const MANY: u64 = 15_000;
    let node = node("8", "24");
    node.run_with(["index", "load", "-", "--quiet"], lines(MANY).as_bytes()).done();
    let whole = node.run(["index", "dump"]).done();
    let file = node.folder().join("dump.tsv");
    let mut dumping = command();
    dumping.env("FARSIDE_POOL", node.url()).args(["index", "dump"]).arg(&file);
    let mut process = Process::start(dumping, node.folder().join("said"));
    let progress = node.folder().join("dump.tsv.progress");
    let is_whole = || std::fs::metadata(&file).is_ok_and(|found| found.len() == whole.out.len() as u64);
    until("the dump has begun", || progress.exists() || is_whole());
    process.signal(Signal::INT);
    process.ended();
    let dump = ["index", "dump", "--resume"].map(OsStr::new);
    if progress.exists() {
        node.run(dump.into_iter().chain([file.as_os_str()])).done();
    }
    assert!(std::fs::read(&file).expect("a file") == whole.out, "the resumed dump differs");
    assert!(!progress.exists());
    node.run(dump.into_iter().chain([file.as_os_str()])).refused("nothing to resume from");
}

#[test]
fn stat_shows_the_shape() {
    let node = node("8", "8");
    let empty = node.run(["index", "stat", "--json"]).done().json();
    assert_eq!((&empty["keys"], &empty["bytes_per_key"]), (&0.into(), &serde_json::Value::Null));
    let lines: String = (0..1000).map(|number| format!("{number}\tv\n")).collect();
    node.run_with(["index", "load", "-", "--quiet"], lines.as_bytes()).done();
    node.run(["index", "del", "5"]).done();
    let stat = node.run(["index", "stat", "--json"]).done().json();
    assert_eq!((&stat["keys"], &stat["locked_leaves"]), (&999.into(), &0.into()), "{stat}");
    // 1000 dense numbers: three nodes with 256 slots and one with 232 keys, below one with four.
    assert_eq!(stat["nodes"]["256"], 4, "{stat}");
    assert_eq!((&stat["nodes"]["4"], &stat["depth"]), (&1.into(), &2.into()), "{stat}");
    // A leaf of 64 bytes for each key, and nodes of 2304; besides, what writers have allocated and not used.
    let (bytes, per_key) = (stat["bytes"].as_u64(), stat["bytes_per_key"].as_f64());
    assert!(bytes >= Some(999 * 64 + 5 * 2304), "{stat}");
    assert_eq!(bytes.map(|bytes| bytes as f64 / 999.0), per_key, "{stat}");
    assert!(stat["counters"]["cache_hits"].is_u64(), "{stat}");
    let text = node.run(["index", "stat"]).done();
    for row in ["keys                             999", "bytes per key", "  of 256 slots", "% of all slots"] {
        assert!(text.text().contains(row), "{row}: {}", text.text());
    }
}

#[test]
fn an_index_of_art_is_used_as_one_of_smart() {
    let node = Node::with(&["--memory", "96MiB"]);
    let create = |name: &str, options: &[&str]| {
        node.run(["store", "create", name, "--kind", "art", "--quota", "24MiB"].iter().chain(options))
    };
    create("default", &["--value-size", "32"]).done();
    node.run_with(["index", "load", "-", "--quiet"], lines(1000).as_bytes()).done();
    node.run(["index", "put", "1", "one"]).done();
    node.run(["index", "put", "0", "zero"]).done();
    node.run(["index", "del", "3"]).done();
    node.run(["index", "del", "3"]).absent();
    assert_eq!(node.run(["index", "get", "0"]).done().out, b"zero");
    let first: Vec<String> = scanned(node.run(["index", "scan", "--limit", "3"]))
        .into_iter()
        .map(|(key, value)| format!("{key} {value}"))
        .collect();
    assert_eq!(first, ["0 zero", "1 one", "6 value 2"]);
    let dumped = node.run(["index", "dump"]).done();
    assert_eq!(dumped.text().lines().count(), 1000);
    node.run(["heal", "--store", "default"]).done();
    let stat = node.run(["index", "stat", "--json"]).done().json();
    assert_eq!((&stat["keys"], &stat["locked_leaves"]), (&1000.into(), &0.into()), "{stat}");
    // About 86 keys in each of 12 nodes, below one for the byte above.
    assert_eq!((&stat["nodes"]["256"], &stat["nodes"]["16"]), (&12.into(), &1.into()), "{stat}");
    assert!(stat["counters"]["nodes_grown_from_48"].is_u64(), "{stat}");

    create("strings", &["--key-size", "string", "--value-size", "1KiB", "--inline-size", "8"]).done();
    node.run(["index", "put", "a", &"v".repeat(1000), "--store", "strings"]).done();
    assert_eq!(node.run(["index", "get", "a", "--store", "strings"]).done().out, "v".repeat(1000).as_bytes());
    create("x", &["--value-size", "49KiB"]).refused("at most 49152 bytes: give a smaller --value-size");
    create("x", &["--items", "7"]).refused("art stores have no --items: leave it out");
}

#[test]
fn stat_shows_the_leaves_of_a_b_plus_tree() {
    let node = Node::with(&["--memory", "96MiB"]);
    let create = ["store", "create", "default", "--kind", "sherman", "--quota", "24MiB", "--value-size", "8"];
    node.run(create).done();
    let empty = node.run(["index", "stat", "--json"]).done().json();
    assert_eq!((&empty["leaves"], &empty["leaf_fill"]), (&0.into(), &serde_json::Value::Null), "{empty}");
    let lines: String = (0..1000).map(|number| format!("{number}\tv\n")).collect();
    node.run_with(["index", "load", "-", "--quiet"], lines.as_bytes()).done();
    let stat = node.run(["index", "stat", "--json"]).done().json();
    assert_eq!((&stat["keys"], &stat["leaf_entries"]), (&1000.into(), &32.into()), "{stat}");
    let leaves = stat["leaves"].as_u64().expect("a number");
    // Leaves are half full after a split, and the last one has at most 32 keys.
    assert!((1000 / 32..=1000 / 16).contains(&leaves), "{stat}");
    assert_eq!(stat["leaf_fill"].as_f64(), Some(1000.0 / (32 * leaves) as f64), "{stat}");
    // A record for each leaf but the first, whether or not it has been promoted.
    assert_eq!(stat["slots"].as_u64(), Some(leaves - 1), "{stat}");
    let text = node.run(["index", "stat"]).done();
    for row in ["leaves ", "of 32 entries each", "entries in use", "% of all entries"] {
        assert!(text.text().contains(row), "{row}: {}", text.text());
    }
}

#[test]
fn an_index_is_used_over_every_fabric_and_over_several_nodes() {
    let folder = tempfile::tempdir().expect("a folder");
    let (socket, ring) = (folder.path().join("node.sock"), folder.path().join("ring.sock"));
    let ring = format!("ring:{}", ring.display());
    let listen = [
        "--memory",
        "64MiB",
        "--listen",
        "tcp://127.0.0.1:0",
        "--listen",
        "udp://127.0.0.1:0",
        "--listen",
        &ring,
    ];
    let first = serve(&socket, &listen, folder.path().join("log"));
    first.line();
    let shm = format!("shm:{}", socket.display());
    let info = farside(["info", "--json", "--pool", &shm]).done().json();
    let listening = |scheme: &str| {
        let urls = info["listening"].as_array().expect("urls").iter().filter_map(serde_json::Value::as_str);
        urls.into_iter().find(|url| url.starts_with(scheme)).expect("an engine").to_owned()
    };
    farside(["store", "create", "i", "--kind", "smart", "--quota", "16MiB", "--pool", &shm]).done();
    for (number, url) in [shm, ring.clone(), listening("tcp"), listening("udp")].iter().enumerate() {
        let index = |arguments: &[&str]| {
            farside(["index"].iter().chain(arguments).chain(&["--store", "i", "--pool", url.as_str()]))
        };
        let key = number.to_string();
        index(&["put", &key, "v"]).done();
        assert_eq!(index(&["get", &key]).done().out, b"v", "{url}");
        assert_eq!(scanned(index(&["scan"])).len(), number + 1, "{url}");
        index(&["put", "99", "v"]).done();
        index(&["del", "99"]).done();
        assert_eq!(index(&["stat", "--json"]).done().json()["keys"], number + 1, "{url}");
    }

    let others = [(); 2].map(|()| Node::with(&["--memory", "64MiB", "--listen", "tcp://127.0.0.1:0"]));
    let pool = format!("{},{},{}", listening("tcp"), others[0].listening(), others[1].listening());
    let index = |arguments: &[&str], input: &[u8]| {
        let mut command = command();
        command.args(arguments).args(["--pool", &pool]);
        crate::support::run(command, input)
    };
    index(&["store", "create", "wide", "--kind", "smart", "--value-size", "32", "--quota", "48MiB"], b"")
        .done();
    index(&["index", "load", "-", "--store", "wide"], lines(300).as_bytes()).done();
    let dumped = index(&["index", "dump", "--store", "wide"], b"").done();
    let mut expected: Vec<String> = lines(300).lines().map(|line| format!("{line}\n")).collect();
    expected.reverse();
    assert!(dumped.text() == expected.concat());
    assert_eq!(index(&["index", "stat", "--store", "wide", "--json"], b"").done().json()["keys"], 300);
}
