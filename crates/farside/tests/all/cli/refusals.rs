//! Invalid command lines are refused with an error that names a remedy.

use crate::cli::{MIB, bytes};
use crate::support::{Node, command, farside, until};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

#[test]
fn invalid_requests_are_refused_with_a_remedy() {
    let node = Node::with(&["--memory", "256MiB", "--store", "default", "--quota", "48MiB"]);
    let url = node.url();
    let long = format!("shm:/tmp/{}", "x".repeat(150));
    let file = format!("shm:{}", node.folder().join("log").display());
    let wrong: [(&[&str], &str); 112] = [
        // Commands and flags.
        (&["frobnicate"], "--help"),
        (&["kv", "steal", "k"], "--help"),
        (&["kv", "get"], "<KEY>"),
        (&["kv", "get", "k", "--frob"], "--help"),
        (&["kv", "put", "k", "v", "w"], "--help"),
        (&["kv", "load"], "<FILE>"),
        (&["info", "--pool"], "a value is required"),
        (&["store", "create", "s", "--store", "t"], "--help"),
        // Nodes.
        (&["info", "--pool", "shm:/nowhere/node.sock"], "start one with 'farside up'"),
        (&["info", "--pool", "/nowhere/node.sock"], "start one with 'farside up'"),
        (&["info", "--pool", &file], "start one with 'farside up'"),
        (&["info", "--pool", ""], "write shm:PATH"),
        (&["info", "--pool", "shm:"], "write shm:PATH"),
        (&["info", "--pool", "udp://127.0.0.1:1"], "no node can be reached"),
        (&["info", "--pool", "tcp://127.0.0.9"], "tcp://127.0.0.9:7460: no node can be reached"),
        (&["info", "--pool", "tcp://127.0.0.1:many"], "write it like tcp://"),
        (&["info", "--pool", "tcp://nowhere.invalid:1"], "check the host's name"),
        (&["info", "--pool", "frob:x"], "use shm:PATH"),
        (&["info", "--pool", "shm:/a,shm:/b"], "no node serves at /a"),
        (&["info", "--pool", "shm:/a,"], "remove the extra comma"),
        (&["info", "--pool", "shm:/a,shm:/a"], "name each node once"),
        (&["info", "--pool", "@/nowhere/nodes.toml"], "could not read"),
        (&["up", "--nodes", "0"], "1..=16"),
        (&["heal", "--pool", "/nowhere/node.sock"], "start one with 'farside up'"),
        (&["heal", "--pool", "local:"], "end with it"),
        (&["heal", "--watch", "1ms", "--pool", &url], "give 100ms to 24h"),
        (&["heal", "--store", "none", "--pool", &url], "the node has default"),
        (&["serve", "--pool", "/nowhere/node.sock"], "--heal"),
        (&["info", "--pool", &long], "use a shorter path"),
        (&["info", "--pool", "local:"], "start one with 'farside up'"),
        (&["kv", "put", "k", "v", "--pool", "local:"], "end with it"),
        (&["store", "list", "--pool", "local:16MiB"], "end with it"),
        (&["bench", "ycsb", "--pool", "local:"], "end with it"),
        (&["kv", "--trace", "stat", "--pool", &url], "leave it out"),
        (&["kv", "load", "--trace", "-", "--pool", &url], "leave it out"),
        (&["kv", "--trace", "dump", "--pool", &url], "leave it out"),
        (&["bench", "ycsb", "--pool", "shm:/nowhere/node.sock"], "start one with 'farside up'"),
        // Stores.
        (&["kv", "get", "k", "--store", "none", "--pool", &url], "the node has: default; create it with"),
        (
            &["kv", "--trace", "get", "k", "--store", "none", "--pool", &url],
            "the node has: default; create it with",
        ),
        (&["kv", "stat", "--store", "none", "--pool", &url], "the node has default"),
        (&["store", "drop", "none", "--pool", &url], "the node has default"),
        (&["store", "create", "default", "--pool", &url], "drop it first"),
        (&["store", "create", "a/b", "--pool", &url], "use 1 to 64 letters"),
        (&["store", "create", "", "--pool", &url], "use 1 to 64 letters"),
        (&["store", "create", "ключ", "--pool", &url], "use 1 to 64 letters"),
        (&["store", "create", "s", "--kind", "chess", "--pool", &url], "use one of prism-kv"),
        (&["store", "create", "s", "--quota", "0", "--pool", &url], "give it 64MiB"),
        (&["store", "create", "s", "--items", "0", "--pool", &url], "--help"),
        (&["store", "create", "s", "--quota", "1500k", "--pool", &url], "'1500k' is not a multiple of 1 MiB"),
        (&["store", "create", "s", "--quota", "-1", "--pool", &url], "--help"),
        (&["store", "create", "s", "--quota", "much", "--pool", &url], "write it like"),
        (&["store", "create", "s", "--quota", "1GiB", "--pool", &url], "smaller --quota"),
        (&["store", "create", "s", "--quota", "16777216TiB", "--pool", &url], "write it like"),
        (&["store", "create", "s", "--quota", "1MiB", "--pool", &url], "fewer --items"),
        (&["store", "create", "s", "--items", "99999999999999", "--pool", &url], "give at most"),
        // Nodes that are to be served.
        (&["serve", "--memory", "8MiB", "--socket", "/nowhere/s"], "/nowhere is not a folder: make it"),
        (&["serve", "--socket", "shm:/tmp/unused.sock"], "leave out shm:, as in --socket /tmp/unused.sock"),
        (&["up", "--socket", "shm:/tmp/unused.sock"], "leave out shm:"),
        (&["serve", "--store", "s", "--items", "0"], "--help"),
        (&["serve", "--memory", "8388609", "--socket", "/tmp/unused.sock"], "multiple of 1 MiB"),
        (&["serve", "--memory", "0", "--socket", "/tmp/unused.sock"], "multiple of 1 MiB"),
        (&["serve", "--memory", "2TiB", "--socket", "/tmp/unused.sock"], "'2TiB': give a multiple of 1 MiB"),
        (&["up", "--memory", "1MiB"], "from 8MiB to 1TiB"),
        (&["serve", "--evict-stopped-after", "soon"], "10s or 2m; a number alone is seconds"),
        (&["serve", "--admin", "frob"], "127.0.0.1:7400"),
        (
            &["serve", "--admin", "0.0.0.0:7400", "--memory", "8MiB", "--socket", "/tmp/unused.sock"],
            "--admin-token-file",
        ),
        (&["serve", "--evict"], "--memory-file"),
        (&["serve", "--engines", "2", "--socket", "/tmp/unused.sock"], "leave --engines out"),
        (&["serve", "--listen", "shm:/tmp/unused.sock"], "shm is served at --socket"),
        (&["serve", "--listen", "tcp://localhost:7460"], "give an address and a port"),
        (
            &["serve", "--insecure-udp", "--listen", "tcp://127.0.0.1:0", "--socket", "/tmp/unused.sock"],
            "leave --insecure-udp out",
        ),
        (&["serve", "--items", "5"], "--store"),
        // Measurements.
        (&["bench", "ycsb", "--fabric", "frob"], "local, shm"),
        (&["bench", "ycsb", "--system", "chess"], "prism-kv"),
        (&["bench", "ycsb", "--workload", "/nowhere/file"], "a, b, c, d, e and f"),
        (&["bench", "ycsb", "--distribution", "frob"], "name one of uniform"),
        (
            &["bench", "ycsb", "--workload", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")],
            "states no workload",
        ),
        (&["bench", "ycsb", "--slot-cache", "99999999999"], "--help"),
        (&["bench", "ycsb", "--value-size", "17MiB"], "give 1 to 16777216 bytes"),
        (&["bench", "ycsb", "--seconds", "0"], "give 0.01 to"),
        (&["bench", "ycsb", "--records", "1000000000", "--value-size", "10000000"], "fewer --records"),
        (
            &[
                "bench",
                "ycsb",
                "--records",
                "1000000000",
                "--items",
                "1000000000",
                "--value-size",
                "10000000",
            ],
            "fewer --items",
        ),
        (&["bench", "ycsb", "--workload", "d", "--operations", "18446744073709551615"], "lower --operations"),
        (
            &[
                "bench",
                "ycsb",
                "--workload",
                "d",
                "--records",
                "900",
                "--items",
                "900",
                "--operations",
                "1000",
                "--warm-up",
                "0",
            ],
            "inserts of the run: give at least ",
        ),
        (
            &["bench", "ycsb", "--verify", "--value-size", "1", "--records", "10"],
            "give --value-size 28 or more",
        ),
        (&["bench", "ycsb", "--fabric", "udp", "--delay", "2s"], "give at most 1 s"),
        (&["bench", "ycsb", "--fabric", "udp", "--pool", &url], "is of fabric shm, not udp: omit --fabric"),
        (&["bench", "floor", "--bare"], "--bare has no meaning for shm"),
        (&["bench", "floor", "--blocking", "--fabric", "local"], "--blocking has no meaning for local"),
        (&["bench", "floor", "--workload", "b"], "give c (reads) or a (half reads, half overwrites)"),
        (&["bench", "floor", "--fabric", "frob"], "local, shm, ring, udp, tcp"),
        (&["bench", "floor", "--fabric", "udp", "--idle-ms", "5"], "--blocking"),
        (&["bench", "floor", "--fabric", "udp", "--blocking", "--rounds", "5"], "--idle-ms"),
        (&["bench", "floor", "--fabric", "tcp", "--tasks", "65"], "1..=64"),
        (&["bench", "floor", "--fabric", "ring", "--value-size", "61441"], "a message carries 0 to 61440"),
        (&["bench", "floor-server", "--fabric", "shm"], "name --fabric ring, udp or tcp"),
        (&["bench", "floor-server", "--fabric", "udp"], "the one that was created with the client's end"),
        (&["bench", "floor", "--seconds", "NaN"], "give 0.01 to"),
        // The simulator.
        (
            &["sim", "--faults", "loss,frob"],
            "unknown fault 'frob': name all, none, or a comma-separated list of loss, duplicate",
        ),
        (&["sim", "--faults", ""], "name all, none"),
        (&["sim", "--faults", "loss", "--carrier", "direct"], "or use --carrier datagrams"),
        (&["sim", "--faults", "delay", "--carrier", "direct"], "--carrier datagrams or connections"),
        (&["sim", "--seeds", "7"], "write 1..300"),
        (&["sim", "--seeds", "9..3"], "write 3..9"),
        (&["sim", "--seed", "-1"], "--help"),
        (&["sim", "--seed", "1", "--seeds", "1..2"], "cannot be used with"),
        (&["sim", "--system", "frob"], "prism-kv"),
        (&["sim", "--carrier", "frob"], "direct, datagrams, connections"),
        (&["sim", "--clients", "33"], "1..=32"),
        (&["sim", "--history", "/tmp/unused.jsonl"], "--seed <N>"),
        (&["sim", "--seed", "1", "--history", "/nowhere/h.jsonl"], "name a file that can be written"),
        (&["demo", "--seconds", "1000"], "give 0.1 to 60"),
    ];
    for (arguments, remedy) in wrong {
        farside(arguments).refused(remedy);
    }
    assert_eq!(
        node.run(["store", "list"]).done().text().lines().count(),
        1,
        "a refused command created a store"
    );
    // URLs and names must be UTF-8.
    for flag in ["--pool", "--store"] {
        farside([OsStr::new("info"), OsStr::new(flag), OsStr::from_bytes(b"\xff")]).refused("UTF-8");
    }
}

#[test]
fn a_full_store_reports_it_and_can_be_emptied() {
    let node = Node::with(&["--memory", "16MiB", "--store", "default", "--quota", "4MiB"]);
    let lines: String = (0..30_000).map(|number| format!("{number}\t{}\n", "v".repeat(400))).collect();
    let full = node.run_with(["kv", "load", "-"], lines.as_bytes()).refused("out of memory").refused("quota");
    assert!(full.err.contains("line "), "{}", full.err);
    assert!(full.err.contains("create a store with a larger --quota"), "{}", full.err);
    let dumped = node.run(["kv", "dump"]).done();
    let stored = dumped.text().lines().count();
    // Lines that were in flight with the failed one may be stored.
    let reported = |before: &str, after: &str| {
        let text = full.err.split(before).nth(1).and_then(|rest| rest.split(after).next());
        text.and_then(|text| text.parse::<usize>().ok()).unwrap_or_else(|| panic!("{}", full.err))
    };
    let before = reported("(the ", " lines before it are stored");
    let unsure =
        if full.err.contains("; of the ") { reported("; of the ", " after it, any may be") } else { 0 };
    assert!((before..=before + unsure).contains(&stored), "{stored}: {}", full.err);
    node.run(["kv", "del", "0"]).done();
    until("the deleted key's memory is free", || {
        node.run(["kv", "put", "0", &"w".repeat(400)]).code == Some(0)
    });
}

#[test]
fn no_command_panics_if_standard_output_is_closed() {
    let node = Node::start();
    node.run_with(["kv", "put", "large"], &bytes(4 * MIB, 5)).done();
    let printing: [&[&str]; 13] = [
        &["--help"],
        &["--version"],
        &["info"],
        &["info", "--json"],
        &["info", "--config"],
        &["store", "list"],
        &["store", "list", "--json"],
        &["store", "create", "s", "--quota", "8MiB"],
        &["store", "drop", "s"],
        &["kv", "get", "large"],
        &["kv", "dump"],
        &["kv", "stat"],
        &["kv", "stat", "--json"],
    ];
    for arguments in printing {
        for both in [false, true] {
            let (reader, writer) = std::io::pipe().expect("a pipe");
            drop(reader);
            let mut command = command();
            command
                .env("FARSIDE_POOL", node.url())
                .args(arguments)
                .stdout(writer.try_clone().expect("a clone"));
            command.stdin(Stdio::null()).stderr(Stdio::piped());
            if both {
                command.stderr(writer);
            }
            let output = command.output().expect("it runs");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(said.is_empty(), "{arguments:?}: {said}");
            let code = output.status.code();
            // clap ignores write errors for the text that it prints itself.
            let asked = arguments[0].starts_with("--");
            let ran_already = arguments == ["store", "create", "s", "--quota", "8MiB"];
            match both && (ran_already || arguments == ["store", "drop", "s"]) {
                true => assert_eq!(code, Some(2), "{arguments:?} was done by the first"),
                false => assert_eq!(code, Some(if asked { 0 } else { 141 }), "{arguments:?}"),
            }
        }
    }
    let mut full = command();
    full.env("FARSIDE_POOL", node.url()).args(["kv", "get", "large"]);
    full.stdin(Stdio::null()).stdout(std::fs::File::create("/dev/full").expect("a device"));
    let output = full.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("free some space"), "{said}");
    until("no session is left", || node.sessions() == 0);
}
