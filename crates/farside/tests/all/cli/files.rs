//! `kv load` and `kv dump` with files: formats, reports, and resuming after an interruption.

use crate::support::{Node, Process, Ran, command, until};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

type Pairs = BTreeMap<String, String>;

fn pairs(count: usize) -> Pairs {
    (0..count).map(|number| (format!("key{number:06}"), format!("value of {number}"))).collect()
}

fn lines(pairs: &Pairs) -> String {
    pairs.iter().map(|(key, value)| format!("{key}\t{value}\n")).collect()
}

/// Parses the lines of a dump, and asserts that no key occurs twice.
#[track_caller]
fn dumped(text: &str) -> Pairs {
    let pairs: Pairs = text
        .lines()
        .map(|line| line.split_once('\t').unwrap_or_else(|| panic!("a line without a tab: {line}")))
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    assert_eq!(pairs.len(), text.lines().count(), "a key occurs twice");
    pairs
}

#[track_caller]
fn kv(node: &Node, action: &str, file: &Path, flags: &[&str]) -> Ran {
    let arguments = [OsStr::new("kv"), OsStr::new(action), file.as_os_str()];
    node.run(arguments.into_iter().chain(flags.iter().map(OsStr::new)))
}

fn progress_of(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".progress");
    name.into()
}

/// Number of keys with which a load or a dump takes long enough to be interrupted.
const MANY: usize = 120_000;

/// Starts a node with a store for [`MANY`] keys.
fn roomy() -> Node {
    Node::with(&["--memory", "256MiB", "--store", "default", "--quota", "100MiB", "--items", "300000"])
}

/// Starts `farside kv ACTION FILE`, where the action is `load` or `dump`.
fn started(node: &Node, action: &str, file: &Path) -> Process {
    let mut command = command();
    command.env("FARSIDE_POOL", node.url()).args(["kv", action]).arg(file);
    Process::start(command, node.folder().join("said"))
}

fn live_buffers(node: &Node) -> u64 {
    node.run(["kv", "stat", "--json"]).done().json()["live_buffers"].as_u64().expect("a number")
}

#[test]
fn every_format_preserves_every_byte() {
    let node = Node::start();
    let all: Vec<u8> = (1..=255).collect();
    node.run_with(
        [b"kv".as_slice(), b"put", &all].map(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes),
        &all,
    )
    .done();
    node.run(["kv", "put", "ключ", "значение\n"]).done();
    node.run(["kv", "put", "empty", ""]).done();
    let expected = dumped(node.run(["kv", "dump"]).done().text());
    for (number, (name, first)) in
        [("a.tsv", b'e'), ("b.jsonl", b'{'), ("c.NDJSON", b'{'), ("d.bin", 0x93), ("e", b'e')]
            .iter()
            .enumerate()
    {
        let file = node.folder().join(name);
        let reported = kv(&node, "dump", &file, &["--json"]).done().json();
        let bytes = std::fs::read(&file).expect("a file");
        assert_eq!((&reported["keys"], &reported["bytes"]), (&3.into(), &bytes.len().into()), "{name}");
        // In tsv the key of all bytes may come first, which begins with an escape.
        assert!(bytes[0] == *first || *first == b'e', "{name} begins with {}", bytes[0]);
        assert!(!progress_of(&file).exists(), "a progress file is left behind");
        let store = format!("s{number}");
        node.run(["store", "create", &store, "--quota", "4MiB"]).done();
        let reported = kv(&node, "load", &file, &["--json", "--store", &store]).done().json();
        assert_eq!((&reported["keys"], &reported["bytes"]), (&3.into(), &bytes.len().into()), "{name}");
        let again = node.run(["kv", "dump", "--store", &store]).done();
        assert_eq!(dumped(again.text()), expected, "{name}");
    }
    for format in ["tsv", "jsonl", "binary"] {
        let piped = node.run(["kv", "dump", "--format", format]).done();
        let store = format!("p-{format}");
        node.run(["store", "create", &store, "--quota", "4MiB"]).done();
        node.run_with(["kv", "load", "-", "--format", format, "--store", &store], &piped.out).done();
        assert_eq!(dumped(node.run(["kv", "dump", "--store", &store]).done().text()), expected, "{format}");
    }
    node.run(["store", "create", "none", "--quota", "4MiB"]).done();
    let empty = node.run(["kv", "dump", "--format", "binary", "--store", "none"]).done();
    assert!(!empty.out.is_empty(), "an empty dump lacks its end mark");
    node.run_with(["kv", "load", "-", "--format", "binary", "--store", "none"], &empty.out).done();
}

#[test]
fn the_last_line_of_a_key_wins() {
    let node = Node::start();
    let lines: String = (0..3000).map(|number| format!("k{}\t{number}\n", number % 7)).collect();
    node.run_with(["kv", "load", "-"], lines.as_bytes()).done();
    let last: Pairs = (2993..3000).map(|number| (format!("k{}", number % 7), number.to_string())).collect();
    assert_eq!(dumped(node.run(["kv", "dump"]).done().text()), last);
}

#[test]
fn a_line_is_stored_without_waiting_for_the_next() {
    let node = Node::start();
    let mut command = command();
    command.env("FARSIDE_POOL", node.url()).args(["kv", "load", "-", "--quiet"]);
    let mut child = command.stdin(std::process::Stdio::piped()).spawn().expect("the command starts");
    let mut input = child.stdin.take().expect("piped");
    for number in 0..3 {
        use std::io::Write;
        writeln!(input, "k{number}\tv").expect("the command reads");
        until("the line is stored", || node.run(["kv", "get", &format!("k{number}")]).code == Some(0));
    }
    drop(input);
    assert!(child.wait().expect("a child process").success());
}

#[test]
fn a_pilaf_store_can_be_loaded_and_not_dumped() {
    let node = Node::start();
    node.run(["store", "create", "p", "--kind", "pilaf", "--quota", "8MiB"]).done();
    let pairs = pairs(1000);
    node.run_with(["kv", "load", "-", "--store", "p"], lines(&pairs).as_bytes()).done();
    assert_eq!(node.run(["kv", "get", "key000999", "--store", "p"]).done().out, b"value of 999");
    let file = node.folder().join("p.tsv");
    kv(&node, "dump", &file, &["--store", "p"]).refused("use a prism-kv store");
    node.run(["kv", "dump", "--format", "binary", "--store", "p"]).refused("use a prism-kv store");
    assert!(!file.exists() && !progress_of(&file).exists());
}

#[test]
fn no_file_is_overwritten_without_a_flag_and_no_flag_is_ignored() {
    let node = Node::start();
    node.run(["kv", "put", "k", "v"]).done();
    let file = node.folder().join("dump.tsv");
    std::fs::write(&file, "mine").expect("a file");
    kv(&node, "dump", &file, &[]).refused("overwrite it with --force");
    kv(&node, "dump", &file, &["--resume"]).refused("nothing to resume");
    assert_eq!(std::fs::read_to_string(&file).expect("text"), "mine");
    kv(&node, "dump", &file, &["--force"]).done();
    assert_eq!(std::fs::read_to_string(&file).expect("text"), "k\tv\n");
    kv(&node, "dump", &file, &["--force", "--resume"]).refused("--help");
    kv(&node, "dump", node.folder(), &["--force"]).refused("not a regular file");
    kv(&node, "dump", Path::new("/nowhere/dump.tsv"), &[]).refused("a folder that you may write to");
    for flag in ["--force", "--resume", "--json"] {
        node.run(["kv", "dump", flag]).refused("name one, or leave them out");
        node.run(["kv", "dump", "-", flag]).refused("name one, or leave them out");
    }
    kv(&node, "load", &file, &["--resume"]).refused("nothing to resume");
    node.run(["kv", "load", "-", "--resume"]).refused("leave --resume out");
    kv(&node, "load", &file, &["--format", "xml"]).refused("binary");
    kv(&node, "load", &file, &["--format", "jsonl"]).refused("line 1 of ").refused("write {\"key\"");
    kv(&node, "load", &file, &["--format", "binary"]).refused("record 1 of ").refused("--format tsv");
}

#[test]
fn a_truncated_or_changed_binary_dump_is_refused_at_its_record() {
    let node = Node::start();
    node.run_with(["kv", "load", "-"], lines(&pairs(20)).as_bytes()).done();
    let file = node.folder().join("whole.bin");
    kv(&node, "dump", &file, &[]).done();
    let whole = std::fs::read(&file).expect("a file");
    let bad = node.folder().join("bad.bin");
    std::fs::write(&bad, &whole[..whole.len() - 1]).expect("a file");
    kv(&node, "load", &bad, &[])
        .refused("record 21 of ")
        .refused("it was cut off")
        .refused("the 20 records before");
    std::fs::remove_file(progress_of(&bad)).expect("a progress file");
    let mut changed = whole.clone();
    changed[16 + 16] ^= 1; // The first key.
    std::fs::write(&bad, &changed).expect("a file");
    kv(&node, "load", &bad, &[])
        .refused("record 1 of ")
        .refused("checksum does not match")
        .refused("nothing is stored");
    assert!(!progress_of(&bad).exists(), "a progress file without progress");
    std::fs::rename(&file, node.folder().join("whole.tsv")).expect("the dump exists");
    kv(&node, "load", &node.folder().join("whole.tsv"), &[]).refused("--format binary");
}

// Resuming.

#[test]
fn a_load_resumes_at_the_line_that_was_corrected() {
    let node = Node::start();
    let file = node.folder().join("lines.tsv");
    let pairs = pairs(2000);
    let good = lines(&pairs);
    let (before, after) = good.split_at(good.find("key001500").expect("a key of the file"));
    std::fs::write(&file, format!("{before}no tab\n{after}")).expect("a file");
    kv(&node, "load", &file, &[])
        .refused("line 1501 of ")
        .refused("the 1500 lines before")
        .refused("--resume");
    // The lines before are not put again: the deleted key stays absent.
    node.run(["kv", "del", "key000000"]).done();
    std::fs::write(&file, format!("{before}{after}")).expect("a file");
    let resumed = kv(&node, "load", &file, &["--resume", "--json"]).done();
    assert_eq!((&resumed.json()["keys"], &resumed.json()["keys_before"]), (&500.into(), &1500.into()));
    assert!(resumed.err.contains("resuming after 1500 keys"), "{}", resumed.err);
    assert!(!progress_of(&file).exists());
    let mut expected = pairs;
    expected.remove("key000000");
    assert_eq!(dumped(node.run(["kv", "dump"]).done().text()), expected);
}

#[test]
fn a_load_does_not_resume_with_another_file_format_or_store() {
    let node = Node::start();
    node.run(["store", "create", "s", "--quota", "8MiB"]).done();
    let file = node.folder().join("lines.tsv");
    let before = lines(&pairs(100));
    std::fs::write(&file, format!("{before}no tab\n")).expect("a file");
    kv(&node, "load", &file, &["--store", "s"]).refused("line 101");
    kv(&node, "load", &file, &["--resume"]).refused("another store");
    kv(&node, "load", &file, &["--resume", "--store", "s", "--format", "jsonl"]).refused("another format");
    kv(&node, "dump", &file, &["--resume", "--store", "s"]).refused("another command");
    std::fs::write(&file, before.replacen("value of 7\n", "value of 8\n", 1)).expect("a file");
    kv(&node, "load", &file, &["--resume", "--store", "s"]).refused("has changed within its first");
    std::fs::write(&file, &before[..before.len() - 9]).expect("a file");
    kv(&node, "load", &file, &["--resume", "--store", "s"]).refused("has changed within its first");
    std::fs::write(&file, &before).expect("a file");
    let anew = node.run(["store", "drop", "s"]).done();
    assert!(anew.text().contains("dropped"));
    node.run(["store", "create", "s", "--quota", "8MiB"]).done();
    kv(&node, "load", &file, &["--resume", "--store", "s"]).refused("created again");
    std::fs::write(progress_of(&file), "{}").expect("a file");
    kv(&node, "load", &file, &["--resume", "--store", "s"]).refused("is not a progress file");
    let begun = kv(&node, "load", &file, &["--store", "s"]).done();
    assert!(
        begun.err.contains("this load starts again") && begun.err.contains("100 keys stored"),
        "{}",
        begun.err
    );
}

#[test]
fn a_load_resumes_after_a_signal() {
    let node = roomy();
    let file = node.folder().join("lines.tsv");
    let pairs = pairs(MANY);
    std::fs::write(&file, lines(&pairs)).expect("a file");
    let mut load = started(&node, "load", &file);
    until("some records are stored", || live_buffers(&node) > 0);
    load.signal(Signal::INT);
    assert_eq!(load.ended(), None, "the signal ends it: {}", load.log());
    assert!(load.log().contains("continue with --resume"), "{}", load.log());
    let reported = kv(&node, "load", &file, &["--resume", "--json"]).done().json();
    let (keys, before) =
        (reported["keys"].as_u64().expect("a number"), reported["keys_before"].as_u64().expect("a number"));
    assert!(before > 0 && keys > 0, "{reported}");
    assert_eq!(keys + before, pairs.len() as u64);
    assert_eq!(dumped(node.run(["kv", "dump"]).done().text()), pairs);
}

#[test]
fn a_dump_resumes_after_a_signal_without_loss_or_repetition() {
    let node = roomy();
    let pairs = pairs(MANY);
    node.run_with(["kv", "load", "-"], lines(&pairs).as_bytes()).done();
    for name in ["dump.tsv", "dump.bin"] {
        let file = node.folder().join(name);
        let mut dump = started(&node, "dump", &file);
        until("the dump has started", || progress_of(&file).exists());
        dump.signal(Signal::TERM);
        assert_eq!(dump.ended(), None, "the signal ends it: {}", dump.log());
        // Bytes after the recorded position are cut off.
        let mut bytes = std::fs::read(&file).expect("a file");
        bytes.extend_from_slice(b"half a rec");
        std::fs::write(&file, &bytes).expect("a file");
        let reported = kv(&node, "dump", &file, &["--resume", "--json"]).done().json();
        let (keys, before) = (&reported["keys"], &reported["keys_before"]);
        assert_eq!(keys.as_u64().zip(before.as_u64()).map(|(a, b)| a + b), Some(MANY as u64), "{reported}");
        assert!(keys.as_u64() > Some(0), "{reported}");
        if name == "dump.tsv" {
            let text = std::fs::read_to_string(&file).expect("text");
            assert_eq!(dumped(&text), pairs);
        } else {
            // A table that is large enough: one that grows while it is dumped ends the dump.
            node.run(["store", "create", "again", "--quota", "100MiB", "--items", "300000"]).done();
            kv(&node, "load", &file, &["--store", "again"]).done();
            assert_eq!(dumped(node.run(["kv", "dump", "--store", "again"]).done().text()), pairs);
        }
    }
}

#[test]
fn a_dump_does_not_resume_after_a_rebuild_or_a_change_of_its_file() {
    let node = roomy();
    let pairs = pairs(MANY);
    node.run_with(["kv", "load", "-"], lines(&pairs).as_bytes()).done();
    let file = node.folder().join("dump.tsv");
    let mut dump = started(&node, "dump", &file);
    until("some records are dumped", || {
        std::fs::metadata(&file).is_ok_and(|found| found.len() > 0) && progress_of(&file).exists()
    });
    dump.signal(Signal::TERM);
    assert_eq!(dump.ended(), None, "the signal ends it: {}", dump.log());
    let kept = std::fs::read(&file).expect("a file");
    assert!(!kept.is_empty());
    let mut changed = kept.clone();
    changed[0] ^= 1;
    std::fs::write(&file, &changed).expect("a file");
    kv(&node, "dump", &file, &["--resume"]).refused("has changed within its first");
    std::fs::write(&file, &kept).expect("a file");
    node.run(["store", "rebuild", "default", "--items", "200000"]).done();
    kv(&node, "dump", &file, &["--resume"]).refused("was rebuilt since").refused("--force");
    kv(&node, "dump", &file, &["--force"]).done();
    assert_eq!(dumped(&std::fs::read_to_string(&file).expect("text")), pairs);
}
