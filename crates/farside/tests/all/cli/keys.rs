//! Keys and values from arguments, files, standard input, and files of lines.

use crate::cli::{KIB, MIB, bytes};
use crate::support::{Node, run};
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

#[test]
fn another_process_gets_a_files_bytes_unchanged() {
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
        assert!(node.run(["kv", "get", &key]).done().out == value, "{size} bytes from a file");
        let key = "by standard input";
        node.run_with(["kv", "put", key, "-"], &value).done();
        assert!(node.run(["kv", "get", key]).done().out == value, "{size} bytes from standard input");
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
    node.run_with(["kv", "put", "k"], &value).refused("standard input is larger than 16.0 MiB");
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
fn an_absent_key_exits_with_1_and_is_reported() {
    let node = Node::start();
    node.run(["kv", "get", "k"]).absent();
    node.run(["kv", "del", "k"]).absent();
    node.run(["kv", "put", "k", "v"]).done();
    assert!(node.run(["kv", "del", "k"]).done().out.is_empty());
    node.run(["kv", "get", "k"]).absent();
    node.run(["kv", "del", "k"]).absent();
}

#[test]
fn a_trace_shows_an_operations_requests() {
    let node = Node::start();
    assert!(node.run(["kv", "put", "ada", "1815"]).done().err.is_empty(), "a trace without --trace");
    let put = node.run(["kv", "--trace", "put", "ada", "1816"]).done();
    for asked in ["call of service 0", "READ", "ALLOCATE", "CAS16", "reclaiming"] {
        assert!(put.err.contains(asked), "{asked}: {}", put.err);
    }
    assert!(put.out.is_empty());
    let get = node.run(["kv", "--trace", "get", "ada"]).done();
    assert!(get.err.contains("READ") && !get.err.contains("ALLOCATE"), "{}", get.err);
    assert_eq!(get.out, b"1816", "the trace is mixed into the value");
    assert!(node.run(["kv", "--trace", "del", "ada"]).done().err.contains("CAS16"));
    node.run(["kv", "--trace", "get", "ada"]).absent();
}

// Files of lines.

#[test]
fn every_byte_survives_a_dump_and_a_load_into_another_store() {
    let node = Node::start();
    node.run(["store", "create", "other", "--quota", "16MiB"]).done();
    // Keys come from a file of lines, because arguments cannot contain every byte.
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
    assert!(sorted(&again.out) == sorted(&dumped.out), "stores with the same items dump different lines");
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
fn a_malformed_line_is_named_and_the_lines_before_it_are_stored() {
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
