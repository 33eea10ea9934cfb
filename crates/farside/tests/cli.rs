//! The command line as strangers and scripts use it: what it prints, what it refuses, and how it ends.

mod support;

use rustix::process::Signal;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::Stdio;
use support::{Node, Process, command, farside, run, serve, until};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Bytes of which any two places differ soon.
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

// Values and keys.

#[test]
fn a_files_bytes_come_out_of_another_process_unchanged() {
    let node = Node::start();
    let file = node.folder().join("file");
    let at = OsString::from(format!("@{}", file.display()));
    let around_the_limit_of_an_item = [60 * KIB - 100, 60 * KIB - 1, 60 * KIB, 60 * KIB + 1, 64 * KIB];
    let sizes = [0, 1, MIB, 16 * MIB].into_iter().chain(around_the_limit_of_an_item);
    for (seed, size) in (1..).zip(sizes) {
        let value = bytes(size, seed);
        std::fs::write(&file, &value).expect("a file");
        let key = format!("{size} bytes");
        node.run([OsStr::new("kv"), OsStr::new("put"), key.as_ref(), &at]).done();
        assert!(node.run(["kv", "get", &key]).done().out == value, "{size} bytes by a file");
        let key = "by standard input";
        node.run_with(["kv", "put", key, "-"], &value).done();
        assert!(node.run(["kv", "get", key]).done().out == value, "{size} bytes by standard input");
    }
}

#[test]
fn a_value_over_the_limit_is_refused_and_changes_nothing() {
    let node = Node::start();
    node.run(["kv", "put", "k", "before"]).done();
    let value = bytes(16 * MIB + 1, 1);
    let file = node.folder().join("file");
    std::fs::write(&file, &value).expect("a file");
    node.run(["kv", "put", "k", &format!("@{}", file.display())]).refused("16.0 MiB").refused("file");
    node.run_with(["kv", "put", "k"], &value).refused("standard input has more than 16.0 MiB");
    assert_eq!(node.run(["kv", "get", "k"]).done().out, b"before");
    node.run(["kv", "del", "k"]).done();
    node.run_with(["kv", "put", "k"], &value).refused("split it");
    node.run(["kv", "get", "k"]).absent();
}

#[test]
fn keys_are_any_bytes_that_an_argument_can_be() {
    let node = Node::start();
    let longest = "k".repeat(4096);
    let odd: [&[u8]; 17] = [
        b" ",
        b"a b",
        b"\t\n\r",
        b"-5",
        b"-",
        b"@file",
        b"'\"`$(x)",
        b"*",
        b"\\x41\\",
        b"{}",
        b"\x01\x7f",
        b"\xff\xfe",
        b"..",
        b"/",
        "ключ".as_bytes(),
        "🗝".as_bytes(),
        longest.as_bytes(),
    ];
    for (number, key) in odd.iter().enumerate() {
        node.run([OsStr::new("kv"), OsStr::new("put"), OsStr::from_bytes(key), number.to_string().as_ref()])
            .done();
    }
    for (number, key) in odd.iter().enumerate() {
        let got = node.run([OsStr::new("kv"), OsStr::new("get"), OsStr::from_bytes(key)]).done();
        assert_eq!(got.out, number.to_string().as_bytes(), "{}", key.escape_ascii());
    }
    for key in odd {
        let del = [OsStr::new("kv"), OsStr::new("del"), OsStr::from_bytes(key)];
        node.run(del).done();
        node.run(del).absent();
    }
    node.run(["kv", "put", "--", "--pool", "a key like a flag"]).done();
    assert_eq!(node.run(["kv", "get", "--", "--pool"]).done().out, b"a key like a flag");
    for action in [&["put", "", "v"][..], &["get", ""], &["del", ""]] {
        node.run([&["kv"], action].concat()).refused("the key is empty");
    }
    let too_long = "k".repeat(4097);
    for action in [&["put", &too_long, "v"][..], &["get", &too_long], &["del", &too_long]] {
        node.run([&["kv"], action].concat()).refused("4097 bytes, at most 4096");
    }
}

#[test]
fn values_are_arguments_files_or_standard_input() {
    let node = Node::start();
    for value in ["", "-5", "a b\n", "=", "ценность"] {
        node.run(["kv", "put", "k", value]).done();
        assert_eq!(node.run(["kv", "get", "k"]).done().out, value.as_bytes());
    }
    for arguments in [&["kv", "put", "k"][..], &["kv", "put", "k", "-"]] {
        node.run_with(arguments, b"\x00@raw\n").done();
        assert_eq!(node.run(["kv", "get", "k"]).done().out, b"\x00@raw\n");
    }
    let file = node.folder().join(OsString::from_vec(b"named \xff".to_vec()));
    std::fs::write(&file, b"by an odd name").expect("a file");
    let at = [b"@", file.as_os_str().as_bytes()].concat();
    node.run([OsStr::new("kv"), OsStr::new("put"), OsStr::new("k"), OsStr::from_bytes(&at)]).done();
    assert_eq!(node.run(["kv", "get", "k"]).done().out, b"by an odd name");
    let folder = format!("@{}", node.folder().display());
    node.run(["kv", "put", "k", "@"]).refused("write @FILE");
    for unreadable in ["@/nowhere/file", &folder] {
        node.run(["kv", "put", "k", unreadable]).refused("could not read").refused("name a file");
    }
    assert_eq!(node.run(["kv", "get", "k"]).done().out, b"by an odd name");
}

#[test]
fn a_closed_standard_input_is_no_value() {
    let node = Node::start();
    let closed = |redirect: &str| {
        let mut command = std::process::Command::new("/bin/sh");
        let script = format!("exec \"$0\" kv put k - {redirect}");
        command
            .args(["-c", &script, env!("CARGO_BIN_EXE_farside")])
            .env_clear()
            .env("FARSIDE_POOL", node.url());
        run(command, b"")
    };
    closed("<&-").refused("standard input is closed");
    node.run(["kv", "get", "k"]).absent();
    closed("</dev/null").done();
    assert!(node.run(["kv", "get", "k"]).done().out.is_empty());
}

#[test]
fn an_absent_key_is_told_by_1_and_a_word() {
    let node = Node::start();
    node.run(["kv", "get", "k"]).absent();
    node.run(["kv", "del", "k"]).absent();
    node.run(["kv", "put", "k", "v"]).done();
    assert!(node.run(["kv", "del", "k"]).done().out.is_empty());
    node.run(["kv", "get", "k"]).absent();
    node.run(["kv", "del", "k"]).absent();
}

#[test]
fn a_trace_tells_what_an_operation_asks_of_the_node() {
    let node = Node::start();
    assert!(node.run(["kv", "put", "ada", "1815"]).done().err.is_empty(), "nobody asked");
    let put = node.run(["kv", "--trace", "put", "ada", "1816"]).done();
    for asked in ["call of service 0", "READ", "ALLOCATE", "CAS16", "retire"] {
        assert!(put.err.contains(asked), "{asked}: {}", put.err);
    }
    assert!(put.out.is_empty());
    let get = node.run(["kv", "--trace", "get", "ada"]).done();
    assert!(get.err.contains("READ") && !get.err.contains("ALLOCATE"), "{}", get.err);
    assert_eq!(get.out, b"1816", "a trace is no part of the value");
    assert!(node.run(["kv", "--trace", "del", "ada"]).done().err.contains("CAS16"));
    node.run(["kv", "--trace", "get", "ada"]).absent();
}

// Files of lines.

#[test]
fn every_byte_survives_a_dump_and_a_load_into_another_store() {
    let node = Node::start();
    node.run(["store", "create", "other", "--quota", "16MiB"]).done();
    // By argument what can be one, by a file's lines what cannot.
    let mut expected = std::collections::BTreeMap::new();
    let mut lines = Vec::new();
    for byte in 0..=255u8 {
        let (key, value) = (vec![b'k', byte], [[byte; 3].as_slice(), b"\\\t"].concat());
        writeln!(lines, "k\\x{byte:02X}\t\\x{byte:02x}\\x{byte:02x}\\x{byte:02x}\\\\\\t").expect("memory");
        expected.insert(key, value);
    }
    let all: Vec<u8> = (0..=255).collect();
    expected.insert(all.clone(), [all.clone(), all.clone()].concat());
    expected.insert(b"empty".to_vec(), Vec::new());
    expected.insert(b"large".to_vec(), bytes(MIB, 7));
    let file = node.folder().join("lines.tsv");
    std::fs::write(&file, &lines).expect("a file");
    let loaded = node.run([OsStr::new("kv"), OsStr::new("load"), file.as_os_str()]).done();
    assert!(loaded.err.contains("256 keys stored"), "{}", loaded.err);
    let escaped: String = all.iter().map(|byte| format!("\\x{byte:02x}")).collect();
    let rest = format!("{escaped}\t{escaped}{escaped}\nempty\t");
    node.run_with(["kv", "load", "-"], rest.as_bytes()).done(); // The last line need not end.
    node.run_with(["kv", "put", "large"], &expected[&b"large"[..]]).done();

    let dumped = node.run(["kv", "dump"]).done();
    assert!(dumped.out.iter().all(|byte| matches!(byte, b' '..=b'~' | b'\t' | b'\n')));
    let quiet = node.run_with(["kv", "load", "-", "--store", "other", "--quiet"], &dumped.out).done();
    assert!(quiet.out.is_empty() && quiet.err.is_empty(), "{}", quiet.err);
    let again = node.run(["kv", "dump", "--store", "other"]).done();
    let sorted = |dump: &[u8]| {
        let mut lines: Vec<Vec<u8>> = dump.split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
        lines.sort();
        lines
    };
    assert!(sorted(&again.out) == sorted(&dumped.out), "two stores with the same items dump the same lines");
    assert_eq!(sorted(&dumped.out).len(), expected.len() + 1);
    for (key, value) in &expected {
        if !key.contains(&0) {
            let get: [&[u8]; 5] = [b"kv", b"get", key, b"--store", b"other"];
            let got = node.run(get.map(OsStr::from_bytes)).done();
            assert!(got.out == *value, "{}", key.escape_ascii());
        }
    }
}

#[test]
fn an_empty_store_dumps_nothing() {
    let node = Node::start();
    assert!(node.run(["kv", "dump"]).done().out.is_empty());
    node.run(["kv", "put", "k", "v"]).done();
    assert_eq!(node.run(["kv", "dump"]).done().out, b"k\tv\n");
    node.run(["kv", "del", "k"]).done();
    assert!(node.run(["kv", "dump"]).done().out.is_empty());
    assert!(node.run_with(["kv", "load", "-"], b"").done().err.contains("0 keys stored"));
}

#[test]
fn a_malformed_line_is_named_and_those_before_it_are_stored() {
    let node = Node::start();
    let long_key = [&[b'k'; 4097][..], b"\tv"].concat();
    let malformed: [(&[u8], &str); 8] = [
        (b"no tab", "no tab between"),
        (b"", "no tab between"),
        (b"k\tv\tw", "second tab"),
        (b"k\\q\tv", "backslash"),
        (b"k\tv\\", "backslash"),
        (b"k\tv\\x4", "two hexadecimal digits"),
        (b"\tv", "the key is empty"),
        (&long_key, "4097 bytes"),
    ];
    for (number, (line, reason)) in malformed.iter().enumerate() {
        let store = format!("s{number}");
        node.run(["store", "create", &store, "--quota", "2MiB", "--items", "100"]).done();
        let lines = [b"a\t1\nb\t2\n", *line, b"\nc\t3\n"].concat();
        let file = node.folder().join("lines.tsv");
        std::fs::write(&file, &lines).expect("a file");
        let load =
            [OsStr::new("kv"), OsStr::new("load"), file.as_os_str(), "--store".as_ref(), store.as_ref()];
        node.run(load).refused(reason).refused("line 3 of ").refused("2 lines before it are stored");
        let dumped = node.run(["kv", "dump", "--store", &store]).done();
        assert_eq!(dumped.text().lines().count(), 2);
        node.run(["store", "drop", &store]).done();
    }
    node.run(["store", "create", "one", "--quota", "2MiB", "--items", "100"]).done();
    let one = ["kv", "load", "-", "--store", "one"];
    node.run_with(one, b"bad").refused("(nothing is stored)");
    node.run_with(one, b"a\t1\nbad").refused("(the line before it is stored)");
    assert!(node.run_with(one, b"a\t1\n").done().err.contains("1 key stored"));
    node.run(["kv", "load", "/nowhere/file"]).refused("could not read /nowhere/file");
    node.run([OsStr::new("kv"), OsStr::new("load"), node.folder().as_os_str()]).refused("could not read");
}

// Stores and what is told of them.

#[test]
fn stores_are_made_listed_and_dropped() {
    let node = Node::with(&["--memory", "64MiB"]);
    assert!(node.run(["store", "list"]).done().out.is_empty());
    node.run(["kv", "get", "k"]).refused("'farside store create default' makes it");
    node.run(["store", "create", "a-B_9.z", "--quota", "8MiB"]).done();
    node.run(["store", "create", "small", "--quota", "2MiB", "--items", "1000", "--collision-free"]).done();
    let listed = node.run(["store", "list"]).done();
    assert_eq!(listed.text(), "a-B_9.z\tprism-kv\t8.0 MiB\nsmall\tprism-kv\t2.0 MiB\n");
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
    node.run(["store", "drop", "small"]).refused("there is no store 'small': there are a-B_9.z");
    node.run(["kv", "get", "k", "--store", "small"])
        .refused("farside: there is no store 'small'; the node has: a-B_9.z; make it by");
    let info = node.run(["info", "--json"]).done().json();
    assert_eq!(info["stores"], serde_json::json!([stores[0]]), "one list of stores is as the other");
    node.run(["store", "create", "small", "--quota", "2MiB", "--items", "1000"]).done();
    node.run(["kv", "get", "k", "--store", "small"]).absent();
}

#[test]
fn many_stores_are_listed() {
    let node = Node::with(&["--memory", "800MiB"]);
    let longest = |number: usize| format!("{number:0>64}");
    let mut made = 0;
    // As many as there can be.
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
fn stat_and_info_say_the_same_to_people_and_to_scripts() {
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
    let people = node.run(["kv", "stat"]).done();
    assert!(people.text().contains("quota") && people.text().contains("48.0 MiB"), "{}", people.text());

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

// Settings.

#[test]
fn flags_win_over_variables_variables_over_the_file_and_the_file_over_what_is_built_in() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml");
    std::fs::write(&file, "pool = 'shm:/file'\nstore = 'filed'\n").expect("a file");
    let told = |flags: &[&str], variables: &[(&str, &OsStr)]| {
        let mut command = command();
        command.envs(variables.iter().copied()).args(["info", "--config", "--json"]).args(flags);
        let ran = run(command, b"").done();
        let told: serde_json::Value = serde_json::from_slice(&ran.out).expect("one object");
        let of = |name: &str| {
            let text = |field: &str| told[name][field].as_str().expect("text").to_owned();
            (text("value"), text("origin"))
        };
        [of("pool"), of("store")]
    };
    let pair = |value: &str, origin: &str| (value.to_owned(), origin.to_owned());
    let (config, path) = (("FARSIDE_CONFIG", file.as_os_str()), file.display().to_string());
    let all = [config, ("FARSIDE_POOL", OsStr::new("shm:/v")), ("FARSIDE_STORE", OsStr::new("named"))];
    assert_eq!(
        told(&["--pool", "shm:/f", "--store", "flagged"], &all),
        [pair("shm:/f", "flag"), pair("flagged", "flag")]
    );
    assert_eq!(told(&[], &all), [pair("shm:/v", "FARSIDE_POOL"), pair("named", "FARSIDE_STORE")]);
    assert_eq!(told(&[], &[config]), [pair("shm:/file", &path), pair("filed", &path)]);
    let [pool, store] = told(&[], &[("XDG_RUNTIME_DIR", OsStr::new("/run/me"))]);
    assert_eq!(
        (pool, store),
        (pair("shm:/run/me/farside/default.sock", "built in"), pair("default", "built in"))
    );
    let home = folder.path().join(".config/farside");
    std::fs::create_dir_all(&home).expect("a folder");
    std::fs::write(home.join("config.toml"), "store = 'mine'").expect("a file");
    assert_eq!(told(&[], &[("HOME", folder.path().as_os_str())])[1].0, "mine");
    // A variable set to nothing is not set.
    assert_eq!(told(&[], &[("FARSIDE_STORE", OsStr::new(""))])[1], pair("default", "built in"));
}

#[test]
fn bad_settings_are_refused_and_unknown_ones_warned_of() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("settings.toml");
    let with = |name: &str, value: &OsStr| {
        let mut command = command();
        command.env(name, value).args(["info", "--config"]);
        run(command, b"")
    };
    let warned = with("FARSIDE_POOOL", OsStr::new("x")).done();
    assert!(warned.err.contains("FARSIDE_POOOL means nothing"), "{}", warned.err);
    assert!(warned.err.contains("FARSIDE_POOL, FARSIDE_STORE"), "{}", warned.err);
    for text in ["pool = 5", "poool = 'x'", "pool = 'unended", "[pool]", "\u{0}"] {
        std::fs::write(&file, text).expect("a file");
        with("FARSIDE_CONFIG", file.as_os_str())
            .refused("no settings file")
            .refused("may set pool and store");
    }
    std::fs::write(&file, b"pool = '\xff'").expect("a file");
    with("FARSIDE_CONFIG", file.as_os_str()).refused("could not read the settings").refused("FARSIDE_CONFIG");
    with("FARSIDE_CONFIG", OsStr::new("/nowhere/file")).refused("could not read the settings");
    with("FARSIDE_CONFIG", folder.path().as_os_str()).refused("could not read the settings");
    with("FARSIDE_POOL", OsStr::from_bytes(b"shm:/\xff")).refused("not UTF-8").refused("unset it");
}

// What is wrong is said, with a remedy.

#[test]
fn whatever_is_wrong_is_refused_with_a_remedy() {
    let node = Node::with(&["--memory", "256MiB", "--store", "default", "--quota", "48MiB"]);
    let url = node.url();
    let long = format!("shm:/tmp/{}", "x".repeat(150));
    let file = format!("shm:{}", node.folder().join("log").display());
    let wrong: [(&[&str], &str); 69] = [
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
        (&["info", "--pool", "udp://127.0.0.1:7460"], "use shm:PATH"),
        (&["info", "--pool", "frob:x"], "use shm:PATH"),
        (&["info", "--pool", "shm:/a,shm:/b"], "name one"),
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
        (&["kv", "get", "k", "--store", "none", "--pool", &url], "the node has: default; make it by"),
        (
            &["kv", "--trace", "get", "k", "--store", "none", "--pool", &url],
            "the node has: default; make it by",
        ),
        (&["kv", "stat", "--store", "none", "--pool", &url], "there are default"),
        (&["store", "drop", "none", "--pool", &url], "there are default"),
        (&["store", "create", "default", "--pool", &url], "drop it first"),
        (&["store", "create", "a/b", "--pool", &url], "use 1 to 64 letters"),
        (&["store", "create", "", "--pool", &url], "use 1 to 64 letters"),
        (&["store", "create", "ключ", "--pool", &url], "use 1 to 64 letters"),
        (&["store", "create", "s", "--kind", "pilaf", "--pool", &url], "name one of prism-kv"),
        (&["store", "create", "s", "--quota", "0", "--pool", &url], "give it 64MiB"),
        (&["store", "create", "s", "--items", "0", "--pool", &url], "--help"),
        (&["store", "create", "s", "--quota", "1500k", "--pool", &url], "'1500k' is no multiple of 1 MiB"),
        (&["store", "create", "s", "--quota", "-1", "--pool", &url], "--help"),
        (&["store", "create", "s", "--quota", "much", "--pool", &url], "write it like"),
        (&["store", "create", "s", "--quota", "1GiB", "--pool", &url], "smaller --quota"),
        (&["store", "create", "s", "--quota", "16777216TiB", "--pool", &url], "write it like"),
        (&["store", "create", "s", "--quota", "1MiB", "--pool", &url], "fewer --items"),
        (&["store", "create", "s", "--items", "99999999999999", "--pool", &url], "give at most"),
        // Nodes that are to be served.
        (&["serve", "--memory", "8MiB", "--socket", "/nowhere/s"], "/nowhere is no folder: make it"),
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
        (&["serve", "--items", "5"], "--store"),
        // Measurements.
        (&["bench", "ycsb", "--fabric", "udp"], "local, shm"),
        (&["bench", "ycsb", "--system", "pilaf"], "prism-kv"),
        (&["bench", "ycsb", "--workload", "/nowhere/file"], "a, b and c"),
        (&["bench", "ycsb", "--distribution", "frob"], "name one of uniform"),
        (
            &["bench", "ycsb", "--workload", concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")],
            "states no workload",
        ),
        (&["bench", "ycsb", "--slot-cache", "99999999999"], "--help"),
        (&["bench", "ycsb", "--value-size", "17MiB"], "give 1 to 16MiB"),
        (&["bench", "ycsb", "--seconds", "0"], "give 0.01 to"),
        (&["bench", "ycsb", "--records", "1000000000", "--value-size", "10000000"], "fewer --records"),
        (&["bench", "ycsb", "--verify", "--value-size", "1", "--records", "10"], "--value-size 28 at least"),
        (&["bench", "floor", "--bare"], "leave --bare out"),
        (&["bench", "floor", "--seconds", "NaN"], "give 0.01 to"),
        (&["demo", "--seconds", "1000"], "give 0.1 to 60"),
    ];
    for (arguments, remedy) in wrong {
        farside(arguments).refused(remedy);
    }
    assert_eq!(node.run(["store", "list"]).done().text().lines().count(), 1, "nothing was made");
    // What is not UTF-8 is no url, no name and no number.
    for flag in ["--pool", "--store"] {
        farside([OsStr::new("info"), OsStr::new(flag), OsStr::from_bytes(b"\xff")]).refused("UTF-8");
    }
}

#[test]
fn a_store_that_is_full_says_so_and_can_be_emptied() {
    let node = Node::with(&["--memory", "16MiB", "--store", "default", "--quota", "4MiB"]);
    let lines: String = (0..30_000).map(|number| format!("{number}\t{}\n", "v".repeat(400))).collect();
    let full = node.run_with(["kv", "load", "-"], lines.as_bytes()).refused("out of memory").refused("quota");
    assert!(full.err.contains("line "), "{}", full.err);
    assert!(full.err.contains("make a store with a greater --quota"), "{}", full.err);
    let dumped = node.run(["kv", "dump"]).done();
    let stored = dumped.text().lines().count();
    assert!(full.err.contains(&format!("the {stored} lines before it are stored")), "{}", full.err);
    node.run(["kv", "del", "0"]).done();
    until("what was deleted has made room", || {
        node.run(["kv", "put", "0", &"w".repeat(400)]).code == Some(0)
    });
}

#[test]
fn nobody_panics_where_standard_output_is_closed() {
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
            // What clap itself prints is not looked after by it.
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
    assert!(output.status.code() == Some(2) && said.contains("make room"), "{said}");
    until("nobody's session is left", || node.sessions() == 0);
}

// Nodes come and go.

#[test]
fn up_serves_what_it_says_and_a_second_one_leaves_it_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let with_home = |arguments: &[&str]| {
        let mut command = command();
        command.env("XDG_RUNTIME_DIR", folder.path()).args(arguments);
        command
    };
    let mut up = Process::start(with_home(&["up", "--memory", "512MiB"]), folder.path().join("log"));
    let socket = folder.path().join("farside/default.sock");
    assert!(up.line().ends_with(&format!("shm:{}", socket.display())));
    assert!(up.line().contains("another terminal"));
    // What it proposes works as it stands, in any shell.
    for expected in ["", "hello", "errors"] {
        let mut proposed = std::process::Command::new("/bin/sh");
        proposed.arg("-c").arg(up.line()).env_clear().env("XDG_RUNTIME_DIR", folder.path());
        assert!(run(proposed, b"").done().text().contains(expected));
    }
    assert!(up.line().contains("Ctrl-C"));

    let second = run(with_home(&["up"]), b"").refused("stop it, or serve elsewhere by --socket");
    assert!(second.err.contains(&up.pid().to_string()), "{}", second.err);
    assert_eq!(run(with_home(&["kv", "get", "greeting"]), b"").done().out, b"hello");
    run(with_home(&["store", "create", "another"]), b"").done();

    up.signal(Signal::INT);
    assert_eq!(up.ended(), Some(0));
    assert!(!socket.exists(), "a node that is told to stop takes its socket with it");
    run(with_home(&["kv", "get", "greeting"]), b"").refused("start one with 'farside up'");
}

#[test]
fn a_stopping_node_takes_its_socket_along_and_a_killed_ones_is_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let (socket, log) = (folder.path().join("node.sock"), folder.path().join("log"));
    let url = format!("shm:{}", socket.display());
    let small = ["--memory", "16MiB", "--store", "default"];
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
        let mut node = serve(&socket, &small, log.clone());
        node.line();
        farside(["kv", "put", "k", "v", "--pool", &url]).done();
        node.signal(signal);
        assert_eq!(node.ended(), Some(0), "{}", node.said());
        assert!(!socket.exists());
    }
    let mut node = serve(&socket, &small, log.clone());
    node.line();
    node.kill();
    assert!(socket.exists());
    farside(["info", "--pool", &url]).refused("no node serves");
    let node = serve(&socket, &small, log.clone());
    node.line();
    farside(["kv", "put", "k", "v", "--pool", &url]).done();
    let mut second = serve(&socket, &small, folder.path().join("second"));
    assert_eq!(second.ended(), Some(2));
    assert!(second.said().contains("already"), "{}", second.said());
    assert_eq!(farside(["kv", "get", "k", "--pool", &url]).done().out, b"v");
}

#[test]
fn of_many_that_find_a_stale_socket_one_serves() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let url = format!("shm:{}", socket.display());
    for round in 0..5 {
        let log = |number| folder.path().join(format!("log-{round}-{number}"));
        let mut nodes: Vec<Process> =
            (0..4).map(|number| serve(&socket, &["--memory", "8MiB"], log(number))).collect();
        until("all have found out", || {
            nodes.iter_mut().filter(|node| node.said().contains("already")).count() == 3
        });
        let pid = farside(["info", "--json", "--pool", &url]).done().json()["pid"].clone();
        let mut serving = nodes.into_iter().filter(|node| node.pid() == pid);
        serving.next().expect("one of them serves").kill(); // So that it leaves a stale one for the next round.
    }
}

#[test]
fn a_node_that_lost_its_place_leaves_the_next_ones_socket_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let mut first = serve(&socket, &["--memory", "8MiB"], folder.path().join("first"));
    first.line();
    std::fs::remove_file(&socket).expect("its socket");
    let second = serve(&socket, &["--memory", "8MiB"], folder.path().join("second"));
    second.line();
    first.signal(Signal::TERM);
    assert_eq!(first.ended(), Some(0));
    let info = farside(["info", "--json", "--pool", &format!("shm:{}", socket.display())]).done().json();
    assert_eq!(info["pid"], second.pid());
}

#[test]
fn a_hangup_that_is_ignored_ends_no_node() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let mut command = std::process::Command::new("/bin/sh");
    let script = "trap '' HUP; exec \"$0\" serve --die-with-parent --memory 8MiB --socket \"$1\"";
    command.args(["-c", script, env!("CARGO_BIN_EXE_farside")]).arg(&socket).env_clear();
    let mut node = Process::start(command, folder.path().join("log"));
    node.line();
    node.signal(Signal::HUP);
    farside(["info", "--pool", &socket.display().to_string()]).done();
    node.signal(Signal::TERM);
    assert_eq!(node.ended(), Some(0));
}

#[test]
fn what_up_proposes_leads_to_it_whatever_else_is_set() {
    let folder = tempfile::tempdir().expect("a folder");
    let inner = folder.path().join("it's a folder");
    std::fs::create_dir(&inner).expect("a folder");
    let mut command = command();
    command.args(["up", "--memory", "512MiB", "--socket", "node.sock"]).current_dir(&inner);
    command.env("FARSIDE_POOL", "shm:/nowhere/node.sock").env("FARSIDE_STORE", "none");
    let up = Process::start(command, folder.path().join("log"));
    assert!(up.line().contains("serves") && up.line().contains("another terminal"));
    for expected in ["", "hello", "errors"] {
        let mut proposed = std::process::Command::new("/bin/sh");
        proposed.arg("-c").arg(up.line()).env_clear();
        proposed.env("FARSIDE_POOL", "shm:/nowhere/node.sock").env("FARSIDE_STORE", "none");
        assert!(run(proposed, b"").done().text().contains(expected));
    }
}

// Those who watch it by HTTP.

/// A node with an admin face, and where that is.
fn watched(folder: &std::path::Path, token: &[u8]) -> (Process, String) {
    let file = folder.join("token");
    std::fs::write(&file, token).expect("a file");
    let token = ["--admin-token-file", file.to_str().expect("UTF-8")];
    let arguments = [&["--memory", "8MiB", "--admin", "127.0.0.1:0"], &token[..]].concat();
    let node = serve(&folder.join("node.sock"), &arguments, folder.join("log"));
    node.line();
    let line = node.line();
    let at = line.split_once("http://").and_then(|(_, rest)| rest.split_once("/{health,stores,metrics}"));
    (node, at.expect("a url with the real port").0.to_owned())
}

fn answer_to(at: &str, question: &str) -> String {
    let mut stream = std::net::TcpStream::connect(at).expect("it listens");
    stream.set_read_timeout(Some(support::PATIENCE)).expect("a timeout");
    stream.write_all(question.as_bytes()).expect("it takes it");
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut stream, &mut answer).expect("it answers and hangs up");
    answer
}

#[test]
fn connections_that_say_nothing_neither_pile_up_nor_last() {
    let folder = tempfile::tempdir().expect("a folder");
    let (node, at) = watched(folder.path(), b"secret\n");
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", node.pid())).expect("it runs").count();
    let before = descriptors();
    let mut idle: Vec<_> = (0..200).map(|_| std::net::TcpStream::connect(&at).expect("it listens")).collect();
    for stream in &mut idle[..20] {
        stream.write_all(b"GET /health HTTP/1.1\r\nHost:").expect("it takes a part");
    }
    until("they were seen", || descriptors() > before);
    assert!(descriptors() <= before + 40, "{} descriptors of 200 strangers", descriptors() - before);
    drop(idle.split_off(20));
    // Those that are left are hung up on; who asks a whole question is answered.
    let question =
        "GET /health HTTP/1.1\r\nHost: n\r\nAuthorization: bearer secret\r\nConnection: close\r\n\r\n";
    assert!(answer_to(&at, question).contains("200 OK"));
    until("they were hung up on", || descriptors() <= before);
    let question = question.replace("secret", "Secret");
    assert!(answer_to(&at, &question).contains("401 Unauthorized"));
}

#[test]
fn a_token_that_no_client_could_send_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, socket) = (folder.path().join("token"), folder.path().join("node.sock"));
    for token in [&b""[..], b"\n", b"two words", b"two\nlines", "ключ".as_bytes(), b"\xff", b"\x01"] {
        std::fs::write(&file, token).expect("a file");
        let arguments = ["serve", "--memory", "8MiB", "--admin", "127.0.0.1:0", "--admin-token-file"];
        let arguments = arguments.map(OsStr::new).into_iter();
        let arguments = arguments.chain([file.as_os_str(), "--socket".as_ref(), socket.as_os_str()]);
        farside(arguments).refused("holds no token: put one");
    }
}

#[test]
fn what_is_no_nodes_socket_is_left_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("file"), "precious").expect("a file");
    std::fs::create_dir(at("folder")).expect("a folder");
    std::os::unix::fs::symlink(at("file"), at("link")).expect("a link");
    let _other = std::os::unix::net::UnixListener::bind(at("stream")).expect("a socket");
    let refuses = |path: &std::path::Path, remedy: &str| {
        let arguments = [OsStr::new("serve"), "--memory".as_ref(), "8MiB".as_ref(), "--socket".as_ref()];
        farside(arguments.into_iter().chain([path.as_os_str()])).refused(remedy);
    };
    for name in ["file", "folder", "link", "stream"] {
        refuses(&at(name), "remove it, or serve elsewhere by --socket");
        assert!(at(name).exists());
    }
    assert_eq!(std::fs::read(at("file")).expect("it is still there"), b"precious");
    refuses(&at(&"x".repeat(120)), "give a shorter --socket");
    refuses(&at("no/folder/node.sock"), "make it, or serve elsewhere by --socket");
    refuses(std::path::Path::new("/proc/node.sock"), "serve elsewhere by --socket");
    farside([OsStr::new("info"), "--pool".as_ref(), at("stream").as_os_str()]).refused("of another type");
    // The folder of the usual socket has to be ours alone.
    std::fs::create_dir(at("farside")).expect("a folder");
    for mode in [0o777, 0o750] {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(at("farside"), std::fs::Permissions::from_mode(mode)).expect("ours");
        let mut up = command();
        up.env("XDG_RUNTIME_DIR", folder.path()).args(["up", "--memory", "8MiB"]);
        run(up, b"").refused("not a folder of yours alone: remove it");
    }
    let mut up = command();
    up.env("XDG_RUNTIME_DIR", at("file")).args(["up", "--memory", "8MiB"]);
    run(up, b"").refused("serve elsewhere by --socket");
}

#[test]
fn a_node_whose_store_cannot_be_made_does_not_serve() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let wrong: [(&[&str], &str); 3] = [
        (&["--store", "a/b"], "use 1 to 64 letters"),
        (&["--store", "s", "--items", "9999999"], "fewer --items"),
        (&["--store", "s", "--quota", "1GiB"], "smaller --quota"),
    ];
    for (arguments, remedy) in wrong {
        let serve = ["serve", "--memory", "16MiB", "--socket"].map(OsStr::new);
        let arguments = serve.into_iter().chain([socket.as_os_str()]).chain(arguments.iter().map(OsStr::new));
        farside(arguments).refused(remedy);
        assert!(!socket.exists());
    }
}

#[test]
fn a_node_lives_on_when_nobody_reads_what_it_says() {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let url = format!("shm:{}", socket.display());
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = command();
    command.args(["serve", "--die-with-parent", "--memory", "32MiB", "--store", "default", "--socket"]);
    command.arg(&socket).stdout(Stdio::piped()).stderr(writer).stdin(Stdio::null());
    let mut node = command.spawn().expect("it starts");
    let mut ready = String::new();
    BufReader::new(node.stdout.take().expect("piped")).read_line(&mut ready).expect("it serves");
    drop((reader, command)); // The command holds the pipe's other end.
    // A client that ends without a word makes it say something.
    let mut client = support::command();
    client
        .args(["kv", "put", "k", "--pool", &url])
        .stdin(Stdio::piped())
        .spawn()
        .and_then(|mut client| {
            until("it is connected", || {
                farside(["info", "--json", "--pool", &url]).done().json()["sessions"] == 2
            });
            client.kill()?;
            client.wait()
        })
        .expect("a client");
    until("the client's end was seen", || {
        farside(["info", "--json", "--pool", &url]).done().json()["sessions"] == 1
    });
    farside(["kv", "put", "k", "v", "--pool", &url]).done();
    node.kill().and_then(|()| node.wait()).expect("ours to kill");
}

#[test]
fn a_memory_file_is_served_again_with_what_it_holds_and_no_other_file_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let (socket, file) = (folder.path().join("node.sock"), folder.path().join("memory"));
    let log = |name: &str| folder.path().join(name);
    let url = format!("shm:{}", socket.display());
    let named = file.display().to_string();
    let mut node =
        serve(&socket, &["--memory", "16MiB", "--store", "default", "--memory-file", &named], log("1"));
    node.line();
    farside(["kv", "put", "k", "v", "--pool", &url]).done();
    let elsewhere = folder.path().join("other.sock");
    let elsewhere = elsewhere.display().to_string();
    let refused = |arguments: &[&str], reason: &str| {
        farside(["serve", "--socket", &elsewhere].iter().chain(arguments)).refused(reason);
    };
    refused(&["--memory-file", &named], "use that one, or stop it");
    node.kill();
    refused(&["--memory-file", &named, "--memory", "32MiB"], "16777216");
    // Whoever does not say how much there is gets what there is.
    let mut node = serve(&socket, &["--memory-file", &named], log("2"));
    assert!(node.line().contains("16.0 MiB"));
    assert_eq!(farside(["kv", "get", "k", "--pool", &url]).done().out, b"v");
    node.kill();
    // What is asked for and not so is told; what is so is not.
    for (arguments, warned) in [
        (&["--store", "default", "--quota", "4MiB"][..], true),
        (&["--store", "default", "--items", "9999999"], true),
        (&["--store", "default", "--collision-free"], true),
        (&["--store", "default"], false),
    ] {
        let again = [&["--memory-file", &named], arguments].concat();
        let mut node = serve(&socket, &again, log("again"));
        node.line();
        let said = node.said();
        assert_eq!(said.contains("'default' already") && said.contains("a quota of"), warned, "{said}");
        node.kill();
    }
    refused(&["--memory-file", &named, "--store", "other"], "drop a store, or serve more --memory");
    let node = serve(&socket, &["--memory-file", &named], log("3"));
    node.line();
    refused(&["--memory-file", &named], "use that one, or stop it");

    std::fs::write(log("text"), "precious").expect("a file");
    std::fs::write(log("noise"), bytes(8 * MIB, 1)).expect("a file");
    refused(
        &["--memory-file", &log("text").display().to_string()],
        "is no farside memory: name another file",
    );
    refused(&["--memory-file", &log("noise").display().to_string()], "no farside memory");
    refused(&["--memory-file", &folder.path().display().to_string()], "could not open");
    refused(&["--memory-file", "/nowhere/file"], "could not open");
    refused(&["--memory-file", "/dev/zero", "--memory", "8MiB"], "is no file");
    refused(&["--memory-file", &named, "--pages", "small"], "--help");
    // A file that was there, and empty, is closed off to others like a new one.
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(log("empty"), "").expect("a file");
    std::fs::set_permissions(log("empty"), std::fs::Permissions::from_mode(0o666)).expect("ours");
    let arguments = ["--memory", "16MiB", "--memory-file", &log("empty").display().to_string()];
    serve(std::path::Path::new(&elsewhere), &arguments, log("4")).line();
    let mode = std::fs::metadata(log("empty")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(std::fs::read(log("text")).expect("it is still there"), b"precious");
    assert!(std::fs::read(log("noise")).expect("it is still there") == bytes(8 * MIB, 1));
}

// Measurements.

#[track_caller]
fn ycsb(arguments: &[&str]) -> serde_json::Value {
    let common = ["bench", "ycsb", "--records", "1000", "--seconds", "0.3", "--json"];
    let report = farside(common.iter().chain(arguments)).done().json();
    assert_eq!(report["system"], "prism-kv");
    let positive = ["load_factor", "mean_probes", "page_size", "ops_per_s"];
    let number = |value: &serde_json::Value| value.as_f64().unwrap_or(-1.0);
    for field in positive {
        assert!(number(&report[field]) > 0.0, "{field}: {report}");
    }
    let latency = &report["latency_us"];
    let [p50, p99, p999] = ["p50", "p99", "p999"].map(|field| number(&latency[field]));
    assert!(0.0 < p50 && p50 <= p99 && p99 <= p999, "{latency}");
    for field in ["round_trips", "requests", "bytes_out", "bytes_in"] {
        assert!(number(&report["per_op"][field]) > 0.0, "{field}: {report}");
    }
    assert!(number(&report["per_op"]["atomics"]) >= 0.0, "{report}");
    assert!(number(&report["cpu_s_per_mop"]["client"]) > 0.0, "{report}");
    assert!(report["cpu_s_per_mop"].as_object().expect("an object").contains_key("node"), "{report}");
    assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()));
    let fields: Vec<&str> = report.as_object().expect("an object").keys().map(String::as_str).collect();
    assert_eq!(fields.len(), 13, "scripts rely on these fields: {fields:?}");
    report
}

#[test]
fn bench_ycsb_measures_local() {
    let a = ycsb(&["--fabric", "local", "--workload", "a", "--verify", "--slot-cache", "1000"]);
    assert_eq!(
        (&a["fabric"], &a["workload"], &a["distribution"]),
        (&"local".into(), &"a".into(), &"zipfian".into())
    );
    assert!(a["cpu_s_per_mop"]["node"].is_null(), "the node is in the client's process");
    assert!(a["per_op"]["atomics"].as_f64() > Some(0.3), "half of workload a are puts: {a}");
    let c = ycsb(&["--fabric", "local", "--workload", "c", "--collision-free", "--distribution", "uniform"]);
    assert_eq!((&c["workload"], &c["distribution"]), (&"c".into(), &"uniform".into()));
    assert_eq!((&c["per_op"]["round_trips"], &c["mean_probes"]), (&1.0.into(), &1.0.into()));
    assert_eq!(c["per_op"]["atomics"], 0.0, "workload c only reads");
}

#[test]
fn bench_ycsb_measures_shm() {
    let a = ycsb(&["--fabric", "shm", "--workload", "a", "--threads", "2", "--verify"]);
    assert_eq!((&a["fabric"], &a["workload"]), (&"shm".into(), &"a".into()));
    assert!(a["cpu_s_per_mop"]["node"].as_f64().is_some(), "{a}");
    let b = ycsb(&["--fabric", "shm", "--workload", "b", "--slot-cache", "100", "--tasks", "1"]);
    assert_eq!(b["workload"], "b");
    assert!(b["per_op"]["round_trips"].as_f64() >= Some(1.0), "{b}");
}

#[test]
fn bench_ycsb_uses_the_node_that_is_named_and_leaves_nothing_behind() {
    let node = Node::with(&["--memory", "256MiB"]);
    let before = node.run(["info", "--json"]).done().json()["unassigned_bytes"].clone();
    let c = ycsb(&["--workload", "c", "--pool", &node.url()]);
    assert_eq!((&c["fabric"], &c["workload"]), (&"shm".into(), &"c".into()));
    assert!(node.run(["store", "list"]).done().out.is_empty());
    assert_eq!(node.run(["info", "--json"]).done().json()["unassigned_bytes"], before);
    until("nobody's session is left", || node.sessions() == 0);
    let people =
        farside(["bench", "ycsb", "--records", "1000", "--seconds", "0.1", "--pool", &node.url()]).done();
    assert!(people.text().contains("ops/s") && people.text().lines().count() >= 2, "{}", people.text());
    let small = Node::with(&["--memory", "16MiB"]);
    farside(["bench", "ycsb", "--records", "1000", "--pool", &small.url()]).refused("leave --pool out");
}

#[test]
fn the_largest_values_are_measured_for_no_longer_than_asked() {
    let ran =
        farside(["bench", "ycsb", "--records", "1", "--value-size", "16MiB", "--seconds", "0.1"]).done();
    assert!(ran.err.contains("warming up"), "{}", ran.err);
}

#[test]
fn a_measurement_that_is_told_to_end_takes_its_store_along() {
    let node = Node::with(&["--memory", "256MiB"]);
    for signal in [Signal::INT, Signal::TERM] {
        let mut command = command();
        command.args(["bench", "ycsb", "--records", "1000", "--seconds", "600", "--pool", &node.url()]);
        let mut bench = Process::start(command, node.folder().join("bench"));
        until("it measures", || bench.said().contains("warming up"));
        assert!(node.run(["store", "list"]).done().text().starts_with("ycsb-"));
        bench.signal(signal);
        assert_eq!(bench.ended(), None, "a signal ended it");
        assert!(node.run(["store", "list"]).done().out.is_empty());
    }
    // Where the node has no answer, it is told what is left.
    let mut command = command();
    command.args(["bench", "ycsb", "--records", "1000", "--seconds", "600", "--pool", &node.url()]);
    let mut bench = Process::start(command, node.folder().join("bench"));
    until("it measures", || bench.said().contains("warming up"));
    node.process.signal(Signal::STOP);
    let stat = format!("/proc/{}/stat", node.process.pid());
    until("the node is stopped", || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T ")));
    bench.signal(Signal::INT);
    assert_eq!(bench.ended(), None, "a signal ended it");
    node.process.signal(Signal::CONT);
    let store =
        node.run(["store", "list", "--json"]).done().json()["name"].as_str().expect("a name").to_owned();
    let remedy = format!("farside store drop {store} --pool {}", node.url());
    assert!(bench.said().contains(&remedy), "{}", bench.said());
}

#[test]
fn bench_floor_measures_what_the_machine_allows() {
    for (fabric, tasks) in [("local", 1), ("shm", 16)] {
        let tasks_flag = tasks.to_string();
        let arguments =
            ["bench", "floor", "--records", "1000", "--seconds", "0.1", "--json", "--fabric", fabric];
        let report = farside(arguments.into_iter().chain(["--tasks", &tasks_flag])).done().json();
        assert_eq!((&report["fabric"], &report["tasks"]), (&fabric.into(), &tasks.into()));
        for field in ["page_size", "rtt_us_p50", "ops_per_s"] {
            assert!(report[field].as_f64() > Some(0.0), "{field}: {report}");
        }
        assert_eq!(report.as_object().expect("an object").len(), 5, "scripts rely on these fields: {report}");
    }
}

#[test]
fn the_demo_shows_a_client_that_reads_on_while_the_node_is_stopped() {
    let demo = farside(["demo", "--records", "20000", "--seconds", "0.2"]).done();
    let rate = |of: &str| -> f64 {
        let line = demo.text().lines().find(|line| line.contains(of)).expect("it is told");
        let rate = line.split_whitespace().find_map(|word| word.parse().ok());
        rate.unwrap_or_else(|| panic!("no number: {line}"))
    };
    for of in ["before 'kill -STOP'", "while it is stopped", "after 'kill -CONT'"] {
        assert!(rate(of) > 0.0, "{}", demo.text());
    }
    let row = |fabric: &str| demo.text().lines().filter(|line| line.trim_start().starts_with(fabric)).count();
    assert!(demo.text().contains("of the floor's rate"), "{}", demo.text());
    assert_eq!((row("local"), row("shm"), row("by hand")), (3, 3, 2), "{}", demo.text());
}
