//! `txn`: transactions on a real node, wrong input, output as JSON, and the exit codes.

use crate::support::{Node, Ran, command, farside, run};
use serde_json::json;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const TRANSFER: &[u8] = b"# moves 30\nadd alice -30\nadd bob 30\n";

fn node() -> Node {
    let node = Node::with(&["--memory", "96MiB", "--listen", "tcp://127.0.0.1:0"]);
    node.run(["store", "create", "default", "--kind", "prism-tx", "--quota", "24MiB"]).done();
    node
}

/// Asserts exit code 1, `reason` on standard error, and nothing on standard output.
#[track_caller]
fn not_good(ran: Ran, reason: &str) {
    assert_eq!(ran.code, Some(1), "{}", ran.err);
    assert!(ran.err.contains(reason), "expected '{reason}', got '{}'", ran.err);
    assert!(ran.out.is_empty(), "{}", ran.out.escape_ascii());
}

#[track_caller]
fn value(node: &Node, key: &str) -> String {
    node.run(["txn", "get", key]).done().text().to_owned()
}

#[test]
fn one_key_is_put_read_and_deleted() {
    let node = node();
    node.run(["txn", "get", "k"]).absent();
    node.run(["txn", "put", "k", "v"]).done();
    assert_eq!(node.run(["txn", "get", "k"]).done().out, b"v");
    node.run_with(["txn", "put", "k"], b"raw\n\0").done();
    assert_eq!(node.run(["txn", "get", "k"]).done().out, b"raw\n\0");
    node.run(["txn", "put", "-7", ""]).done();
    assert_eq!(node.run(["txn", "get", "-7"]).done().out, b"");
    let file = node.folder().join("value");
    std::fs::write(&file, "of a file").expect("a file");
    node.run(["txn", "put", "k", &format!("@{}", file.display())]).done();
    assert_eq!(value(&node, "k"), "of a file");
    node.run(["txn", "del", "k"]).done();
    node.run(["txn", "del", "k"]).absent();
    node.run(["txn", "get", "k"]).absent();
}

#[test]
fn the_operations_of_a_file_take_effect_together_or_not_at_all() {
    let node = node();
    let run = |script: &str| node.run_with(["txn", "run", "-"], script.as_bytes());
    let opened = run("put alice 100\nput bob 0\nput 'the key' \"a\\nb\"\nget 'the key'\n").done();
    assert_eq!(opened.text(), "\"the key\" \"a\\nb\"\n");
    let [file, adding] = ["transfer", "adding"].map(|name| node.folder().join(name));
    std::fs::write(&file, TRANSFER).expect("a file");
    std::fs::write(&adding, "add bob 7").expect("a file");
    let moved = node.run(["txn".as_ref(), "run".as_ref(), file.as_os_str()]).done();
    assert_eq!(moved.text(), "\"alice\" \"70\"\n\"bob\" \"30\"\n");
    let read = node.run_with(["txn", "run", "-", "--json"], b"get alice\nget nobody\nadd new -1\n").done();
    let reads = json!([
        {"key": "alice", "value": "70"}, {"key": "nobody", "value": null}, {"key": "new", "value": "-1"}
    ]);
    assert_eq!(read.json(), json!({"committed": true, "attempts": 1, "reads": reads}));

    // A script whose expectation does not hold changes nothing, and prints nothing without --json.
    not_good(run("put alice 0\nexpect bob 0\nget bob\n"), "\"bob\" has \"30\", and nothing was changed");
    not_good(run("put alice 0\nexpect nobody 1\n"), "\"nobody\" has no value, and nothing was changed");
    not_good(run("put alice 0\nexpect bob\n"), "\"bob\" has \"30\", and nothing was changed");
    run("add alice 1\nadd 'the key' 1\n").refused("is not a number to which 1 can be added");
    run(&format!("add alice 1\nadd alice {}\n", i64::MAX))
        .refused("have no sum of 64 bits, and nothing was changed");
    let failed = node.run_with(["txn", "run", "-", "--json"], b"put alice 0\nexpect bob 0\n");
    let reason = "\"bob\" has \"30\", and nothing was changed";
    assert_eq!((failed.code, failed.json()), (Some(1), json!({"committed": false, "reason": reason})));
    assert_eq!((value(&node, "alice"), value(&node, "bob")), ("70".into(), "30".into()));
    run("expect alice 70\nexpect nobody\ndel alice\nput bob 100\nget alice\n").done();
    node.run(["txn", "get", "alice"]).absent();
    assert_eq!(value(&node, "bob"), "100");
    // What is committed is not reported as unchanged.
    let mut full = command();
    full.env("FARSIDE_POOL", node.url()).args(["txn", "run"]).arg(&adding);
    full.stdout(std::fs::File::create("/dev/full").expect("a device"));
    let unwritten = full.output().expect("the command starts");
    let told = String::from_utf8_lossy(&unwritten.stderr).into_owned();
    assert_eq!(unwritten.status.code(), Some(3), "{told}");
    assert!(told.contains("the transaction was committed, and what it has read is lost"), "{told}");
    assert_eq!(value(&node, "bob"), "107");
    // A script without an operation commits, and changes nothing.
    assert_eq!(run("# nothing\n").done().text(), "");
}

#[test]
fn wrong_input_is_refused_and_changes_nothing() {
    let node = node();
    let of_script = |script: &str| node.run_with(["txn", "run", "-"], script.as_bytes());
    of_script("put k 1\nfrob k\n").refused("line 2: this is no operation");
    of_script("put k 1\nadd k many\n").refused("line 2: \"many\" is not a number");
    of_script("put k 'a\n").refused("line 1: a single quote is not closed");
    node.run(["txn", "run", "/nowhere"]).refused("could not read /nowhere");
    node.run(["txn", "put", "k", "@/nowhere"]).refused("could not read /nowhere");
    node.run(["txn", "put", "", "v"]).refused("the key is empty: give it 1 to 1024 bytes");
    node.run(["txn", "get", &"k".repeat(1025)]).refused("the key has 1025 bytes, at most 1024");
    node.run_with(["txn", "put", "k"], &[0; 48 << 10 | 1]).refused("the value has 49153 bytes, and at most");
    node.run(["txn", "get", "k", "--attempts", "0"]).refused("--attempts");
    node.run(["txn", "get", "k"]).absent();

    node.run(["txn", "get", "k", "--store", "none"]).refused("there is no store 'none'");
    node.run(["store", "create", "kv", "--quota", "2MiB"]).done();
    node.run(["txn", "get", "k", "--store", "kv"]).refused(
        "store 'kv' is a key-value store, not a transactional store: use 'farside kv', or name another",
    );
    node.run(["kv", "get", "k"]).refused(
        "store 'default' is a transactional store, not a key-value store: use 'farside txn', or name",
    );
    let mut gone = command();
    gone.args(["txn", "get", "k", "--pool", "shm:/nowhere"]);
    run(gone, b"").refused("no node serves at /nowhere");
}

#[test]
fn a_farm_store_has_backups_on_other_nodes() {
    let nodes = [(); 2].map(|()| Node::with(&["--memory", "64MiB"]));
    let pool = nodes.each_ref().map(Node::url).join(",");
    let create = |more: &[&str]| {
        let common = ["store", "create", "bank", "--kind", "farm", "--quota", "32MiB", "--pool", &pool];
        farside(common.iter().chain(more))
    };
    create(&["--backups", "2"]).refused("needs 3 nodes, and this one has 2: give fewer --backups");
    create(&["--backups", "1", "--members", "1"]).refused("needs 2 nodes, and this one has 1");
    create(&["--backups", "5"]).refused("--backups");
    create(&["--prepare", "paper"]).refused("farm stores have no --prepare");
    nodes[0].run(["store", "create", "bank", "--kind", "prism-tx", "--backups", "0"]).refused("no --backups");
    create(&["--backups", "1"]).done();
    let script = ["txn", "run", "-", "--store", "bank", "--pool", &pool];
    let mut transfer = command();
    transfer.args(script);
    run(transfer, b"put alice 100\nput bob 20\nput carol 3\n").done();
    assert_eq!(farside(["txn", "get", "bob", "--store", "bank", "--pool", &pool]).done().out, b"20");
}

/// Forwards connections to a node, and cuts them all after this number of responses.
fn cut_after(node: String, responses: u64) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("tcp://{}", listener.local_addr().expect("an address"));
    let seen = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&seen);
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            if counted.load(Ordering::Acquire) >= responses {
                continue;
            }
            let server = TcpStream::connect(node.trim_start_matches("tcp://")).expect("the node listens");
            for end in [&client, &server] {
                end.set_nodelay(true).expect("a socket");
            }
            let ends = || (client.try_clone().expect("a socket"), server.try_clone().expect("a socket"));
            let ((from, to), (back_to, back_from)) = (ends(), ends());
            std::thread::spawn(move || forward(from, to, || true));
            let counted = Arc::clone(&counted);
            std::thread::spawn(move || {
                forward(back_from, back_to, || counted.fetch_add(1, Ordering::AcqRel) < responses);
            });
        }
    });
    (url, seen)
}

/// Forwards bytes as they come, until one end closes or `goes_on` returns false. Then closes both ends.
fn forward(mut from: TcpStream, mut to: TcpStream, goes_on: impl Fn() -> bool) {
    let mut bytes = vec![0; 1 << 16];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if !goes_on() || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _closed_already = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// The connection of a client is cut after one of its last responses: earlier if the client has committed, later if it
/// knows that it has not, until one cut has hit the commit. The exit code says what is known, and the next client finds
/// all keys free. Responses that arrive at the same time count as one, so the number of the commit's response varies.
#[test]
fn the_exit_code_of_a_transaction_whose_connection_is_cut_tells_whether_it_has_committed() {
    const CUTS_MAX: usize = 200;
    let node = node();
    node.run_with(["txn", "run", "-"], b"put alice 100000\nput bob 0\n").done();
    let transfer = |responses: u64| {
        let (url, seen) = cut_after(node.listening(), responses);
        let mut transfer = command();
        transfer.env("FARSIDE_POOL", url).args(["txn", "run", "-"]);
        (run(transfer, TRANSFER), seen.load(Ordering::Acquire))
    };
    let (whole, responses) = transfer(u64::MAX);
    whole.done();
    let (mut before, mut codes, mut cut) = (30, Vec::new(), responses - 1);
    while codes.len() < CUTS_MAX && !(codes.contains(&2) && codes.contains(&3)) {
        let (ran, _) = transfer(cut);
        cut = if ran.code == Some(2) { cut + 1 } else { cut.saturating_sub(1) };
        let sum = value(&node, "bob").parse::<u64>().expect("a number");
        let left = value(&node, "alice").parse::<u64>().expect("a number");
        assert_eq!(left + sum, 100_000, "a part of a transfer has taken effect");
        let may_be: &[u64] = match ran.code {
            Some(0) => &[30],
            Some(2) => &[0],
            Some(3) => &[0, 30],
            _ => panic!("exit code {:?}: {}", ran.code, ran.err),
        };
        assert!(may_be.contains(&(sum - before)), "{:?} after {}: {}", ran.code, sum - before, ran.err);
        if ran.code == Some(3) {
            assert!(ran.err.contains("may or may not have been committed"), "{}", ran.err);
            assert!(ran.out.is_empty(), "{}", ran.out.escape_ascii());
        }
        codes.extend(ran.code);
        before = sum;
    }
    println!("exit codes: {codes:?}");
    assert!(codes.contains(&3), "no cut hit the commit: {codes:?}");
    assert!(codes.contains(&2), "no cut came before the commit: {codes:?}");
}
