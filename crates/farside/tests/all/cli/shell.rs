//! The shell: a command from the arguments, commands from a pipe, and commands typed at a terminal.

use crate::cli::terminal::Terminal;
use crate::support::{Node, command, farside, serve, until};
use rustix::process::Signal;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

fn lines(text: &str) -> Vec<&str> {
    text.lines().collect()
}

// From the arguments.

#[test]
fn a_command_from_the_arguments_has_the_usual_exit_codes() {
    let node = Node::start();
    assert_eq!(node.run(["shell", "put", "greeting", "hello"]).done().out, b"ok\n");
    assert_eq!(node.run(["shell", "get", "greeting"]).done().out, b"hello\n");
    assert_eq!(node.run(["shell", "GETV", "greeting"]).done().out, b"1\thello\n");
    assert_eq!(node.run(["shell", "exists", "greeting"]).done().out, b"yes\n");
    assert_eq!(node.run(["shell", "exists", "nobody"]).code, Some(1));
    node.run(["shell", "get", "nobody"]).absent();
    node.run(["shell", "getv", "nobody"]).absent();
    node.run(["shell", "del", "nobody"]).absent();
    assert_eq!(
        node.run(["shell", "put", "-5", "--json"]).done().out,
        b"ok\n",
        "flags after the command are words"
    );
    assert_eq!(node.run(["kv", "get", "-5"]).done().out, b"--json");
    let odd = [b"shell".as_slice(), b"put", b"\xff\"", b"\xfe '"].map(OsStr::from_bytes);
    node.run(odd).done();
    assert_eq!(
        node.run([b"shell".as_slice(), b"get", b"\xff\""].map(OsStr::from_bytes)).done().out,
        b"\xfe '\n"
    );
    node.run(["shell", "del", "greeting"]).done();
    node.run(["shell", "get", "greeting"]).absent();
}

#[test]
fn an_unmet_condition_stores_nothing_and_is_reported() {
    let node = Node::start();
    assert_eq!(node.run(["shell", "put-if-absent", "k", "a"]).done().out, b"ok\n");
    let unmet = node.run(["shell", "put-if-absent", "k", "b"]);
    assert!(unmet.code == Some(1) && unmet.out.is_empty() && unmet.err.contains("already has a value"));
    let version = node.run(["shell", "--json", "getv", "k"]).done().json()["version"].to_string();
    let new = node.run(["shell", "cas", "k", &version, "c"]).done();
    assert_ne!(new.text().trim(), version);
    let stale = node.run(["shell", "cas", "k", &version, "d"]);
    assert!(stale.code == Some(1) && stale.out.is_empty());
    assert!(stale.err.contains(&format!("version {} instead", new.text().trim())), "{}", stale.err);
    let stale = node.run(["shell", "--json", "cas", "k", &version, "d"]);
    assert_eq!((stale.code, &stale.json()["stored"]), (Some(1), &false.into()));
    assert_eq!(node.run(["kv", "get", "k"]).done().out, b"c");
    assert!(node.run(["shell", "cas", "none", "1", "d"]).err.contains("no value"));
}

#[test]
fn malformed_commands_are_refused_with_a_remedy() {
    let node = Node::start();
    let url = node.url();
    for (arguments, remedy) in [
        (&["frob"][..], "'help'"),
        (&["get"], "'get KEY'"),
        (&["get", "k", "--json"], "before the command"),
        (&["cas", "k", "x", "v"], "'getv'"),
        (&["--raw", "--json", "get", "k"], "--help"),
        (&["--keep-going", "get", "k"], "--help"),
        (&["put", "", "v"], "the key is empty"),
        (&["use", "none"], "the node has: default"),
        (&["--store", "none", "get", "k"], "the node has: default"),
    ] {
        farside([&["shell", "--pool", &url], arguments].concat()).refused(remedy);
    }
    farside(["shell", "--pool", "shm:/nowhere/node.sock", "get", "k"]).refused("start one with 'farside up'");
    farside(["shell", "--pool", "shm:/nowhere/node.sock"]).refused("start one with 'farside up'");
    // A command that sends no request works without a node.
    assert!(farside(["shell", "help"]).done().text().contains("put-if-absent"));
    assert!(farside(["shell", "help", "CAS"]).done().text().contains("getv"));
    node.run(["store", "create", "p", "--kind", "pilaf", "--quota", "8MiB"]).done();
    let pilaf = node.run(["shell", "--store", "p", "put", "k", "v"]).done();
    assert_eq!(pilaf.out, b"ok\n");
    for command in [&["keys"][..], &["put-if-absent", "k", "v"], &["cas", "k", "1", "v"]] {
        node.run([&["shell", "--store", "p"], command].concat()).refused("use a prism-kv store");
    }
}

// From a pipe.

#[test]
fn each_line_of_a_pipe_is_a_command() {
    let node = Node::start();
    let script = "# people\n\nput ada 1815\n  put 'grace h' \"19\\x30\\x36\"\r\nget ada\nget nobody\nGET \"grace h\"\n";
    let ran = node.run_with(["shell"], script.as_bytes()).done();
    assert_eq!(lines(ran.text()), ["ok", "ok", "1815", "", "1906"]);
    assert!(ran.err.contains("line 6: absent"), "{}", ran.err);
    let ran = node.run_with(["shell"], b"keys\nquit\nput late x\n").done();
    assert_eq!(lines(ran.text()).len(), 2);
    node.run(["kv", "get", "late"]).absent();
    assert!(node.run_with(["shell"], b"").done().out.is_empty());
    let longest = format!("put long \"{}\"", "\\x41".repeat(1 << 20));
    node.run_with(["shell"], longest.as_bytes()).done(); // The last line need not end.
    assert!(node.run(["kv", "get", "long"]).done().out == vec![b'A'; 1 << 20]);
}

#[test]
fn a_failed_line_ends_the_shell_unless_it_keeps_going() {
    let node = Node::start();
    let script = b"put a 1\n\nfrob\nput b 2\nput \"c\n";
    let ran = node.run_with(["shell"], script);
    assert_eq!((ran.code, ran.text()), (Some(2), "ok\n"));
    assert!(ran.err.contains("line 3: there is no command \"frob\""), "{}", ran.err);
    node.run(["kv", "get", "b"]).absent();
    let ran = node.run_with(["shell", "--keep-going"], script);
    assert_eq!((ran.code, ran.text()), (Some(2), "ok\nok\n"));
    for said in ["line 3: ", "line 5: ", "2 of 5 lines failed"] {
        assert!(ran.err.contains(said), "{said}: {}", ran.err);
    }
    node.run(["kv", "get", "b"]).done();
}

#[test]
fn json_objects_have_the_number_of_the_line_they_answer() {
    let node = Node::start();
    let script = b"put a \"\\xff\"\nget a\nget b\nput-if-absent a c\nexists b\nkeys a\n";
    let ran = node.run_with(["shell", "--json"], script).done();
    let objects: Vec<serde_json::Value> =
        lines(ran.text()).into_iter().map(|line| serde_json::from_str(line).expect(line)).collect();
    let expected = serde_json::json!([
        { "line": 1, "ok": true },
        { "line": 2, "found": true, "key": "a", "value_base64": "/w==" },
        { "line": 3, "found": false, "key": "b" },
        { "line": 4, "stored": false },
        { "line": 5, "exists": false },
        { "line": 6, "key": "a" },
        { "line": 6, "count": 1, "more": false },
    ]);
    assert_eq!(serde_json::Value::from(objects), expected);
}

#[test]
fn a_listing_stops_after_count_keys_and_reports_more() {
    let node = Node::start();
    let script: String =
        (0..250).map(|number| format!("put user:{number} {number}\nput other:{number} x\n")).collect();
    node.run_with(["shell"], script.as_bytes()).done();
    let some = node.run(["shell", "keys", "user:"]).done();
    assert_eq!(lines(some.text()).len(), 100);
    assert!(lines(some.text()).iter().all(|key| key.starts_with("user:")));
    assert!(some.err.contains("there may be more"), "{}", some.err);
    let all = node.run(["shell", "scan", "user:", "1000"]).done();
    assert_eq!(lines(all.text()).len(), 250);
    assert!(all.err.is_empty() && lines(all.text()).contains(&"user:7\t7"));
    assert_eq!(lines(node.run(["shell", "keys", "", "1000"]).done().text()).len(), 500);
    assert!(node.run(["shell", "keys", "nobody"]).done().out.is_empty());
}

// At a terminal.

fn typed(node: &Node) -> Terminal {
    let mut command = command();
    command.env("FARSIDE_POOL", node.url()).env("XDG_STATE_HOME", node.folder().join("state")).arg("shell");
    let terminal = Terminal::start(command);
    terminal.shows("default> ");
    terminal
}

#[test]
fn a_terminal_gets_quoted_values_without_control_sequences() {
    let node = Node::start();
    let mut terminal = typed(&node);
    terminal.types("put k \"a\\x1b[2J\\n\"\r");
    terminal.shows("ok\r\n");
    terminal.types("get k\r");
    terminal.shows("\"a\\x1b[2J\\n\"\r\n");
    terminal.types("get nobody\r");
    terminal.shows("(absent)\r\n");
    terminal.types("getv k\r");
    terminal.shows("(version 1) \"a\\x1b[2J\\n\"\r\n");
    terminal.types("frob\r");
    terminal.shows("error: there is no command \"frob\"");
    terminal.types("time on\r");
    terminal.shows("ok");
    terminal.types("get k\r");
    terminal.shows(" ms)");
    terminal.types("trace on\r");
    terminal.shows("ok");
    terminal.types("get k\r");
    terminal.shows("chain of ");
    terminal.types("quit\r");
    assert_eq!(terminal.ended(), 0);
    assert!(terminal.is_restored());
}

#[test]
fn control_c_cancels_a_line_and_control_d_exits() {
    let node = Node::start();
    let mut terminal = typed(&node);
    terminal.types("put k cancelled\x03");
    terminal.shows("default> ");
    terminal.types("get k\r");
    terminal.shows("(absent)");
    terminal.shows("default> "); // Before, Ctrl-D would go to the terminal's own line discipline.
    terminal.types("\x04");
    assert_eq!(terminal.ended(), 0);
    assert!(terminal.is_restored());
}

#[test]
fn an_interrupt_ends_a_listing_and_not_the_shell() {
    // Sized in advance, because a table that grows would end the listing as well.
    let arguments = ["--memory", "96MiB", "--store", "default", "--quota", "48MiB", "--items", "200000"];
    let node = Node::with(&arguments);
    let lines: String = (0..100_000).map(|number| format!("{number}\tv\n")).collect();
    node.run_with(["kv", "load", "-"], lines.as_bytes()).done();
    let mut terminal = typed(&node);
    terminal.types("keys \"\" 1000000\r");
    terminal.shows("100) ");
    terminal.signal(Signal::INT);
    terminal.shows("> ");
    let listed = terminal.shown();
    assert!(!listed.contains("100000) "), "the listing ran to its end");
    terminal.types("get nobody\r");
    terminal.shows("(absent)");
}

#[test]
fn names_are_completed() {
    let node = Node::start();
    node.run(["store", "create", "sessions", "--quota", "8MiB"]).done();
    let mut terminal = typed(&node);
    terminal.types("put-\tk v\r");
    terminal.shows("ok");
    terminal.types("use ses\t\r");
    terminal.shows("sessions> ");
    terminal.types("get k\r");
    terminal.shows("(absent)");
    terminal.types("use nobody\r");
    terminal.shows("error: there is no store 'nobody'");
    terminal.shows("sessions> ");
}

#[test]
fn the_history_file_holds_no_value_and_is_private() {
    let node = Node::start();
    let mut terminal = typed(&node);
    terminal.types("put k secret\r");
    terminal.shows("ok");
    terminal.types("getv k\r");
    terminal.shows("\"secret\"");
    terminal.types("\x1b[A\x1b[A\r"); // Up twice: the line with the value stays in memory while the shell is open.
    terminal.shows("ok");
    terminal.shows("default> ");
    terminal.types("\x04");
    terminal.ended();
    let path = node.folder().join("state/farside/history");
    assert_eq!(std::fs::read_to_string(&path).expect("a history"), "getv k\n");
    let mode = std::fs::metadata(&path).expect("a history").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut terminal = typed(&node);
    terminal.types("\x1b[A\r");
    terminal.shows("(version 2) \"secret\"");
}

#[test]
fn a_signal_restores_the_terminal() {
    let node = Node::start();
    let mut terminal = typed(&node);
    assert!(!terminal.is_restored(), "the editor has not changed the terminal's modes");
    terminal.signal(Signal::TERM);
    assert_eq!(terminal.ended(), 128 + 15);
    assert!(terminal.is_restored());
}

#[test]
fn commands_fail_while_the_node_is_gone_and_work_when_it_is_back() {
    let mut node = Node::start();
    let mut terminal = typed(&node);
    terminal.types("put k v\r");
    terminal.shows("ok");
    node.process.kill();
    // Until the client notices, it can read the mapped memory.
    until("the client notices the node's end", || {
        terminal.types("get k\r");
        std::thread::sleep(std::time::Duration::from_millis(50));
        terminal.shown().contains("error: ")
    });
    for _ in 0..2 {
        terminal.types("get k\r");
        terminal.shows("error: ");
        terminal.shows("farside up");
        terminal.shows("default> ");
    }
    let arguments = ["--memory", "96MiB", "--store", "default", "--quota", "48MiB"];
    let again = serve(node.socket(), &arguments, node.folder().join("second log"));
    assert!(again.line().contains("serves"));
    terminal.types("get k\r");
    terminal.shows("its former content is gone");
    terminal.shows("(absent)");
    terminal.types("put k w\r");
    terminal.shows("ok");
    terminal.types("get k\r");
    terminal.shows("\"w\"");
}

#[test]
fn a_store_that_was_dropped_and_created_again_is_reported() {
    let node = Node::start();
    node.run(["store", "create", "s", "--quota", "8MiB"]).done();
    let mut terminal = typed(&node);
    terminal.types("use s\r");
    terminal.shows("s> ");
    terminal.types("put k v\r");
    terminal.shows("ok");
    node.run(["store", "drop", "s"]).done();
    terminal.types("get k\r");
    terminal.shows("error: there is no store 's'");
    node.run(["store", "create", "s", "--quota", "8MiB"]).done();
    terminal.types("get k\r");
    terminal.shows("its former content is gone");
    terminal.shows("(absent)");
}

#[test]
fn a_store_is_the_same_one_if_the_first_of_its_nodes_has_ended() {
    let nodes = [(); 2].map(|()| Node::start());
    let pool = nodes.each_ref().map(Node::url).join(",");
    let with_pool = |arguments: &[&str]| farside([arguments, &["--pool", &pool]].concat());
    with_pool(&["store", "create", "both", "--quota", "8MiB"]).done();
    let (file, log) = (nodes[1].folder().join("keys.tsv"), nodes[1].folder().join("state"));
    let keys: String = (0..32).map(|n| format!("key{n}\tvalue\n")).collect();
    std::fs::write(&file, format!("{keys}no tab\n")).expect("a file");
    let file = file.display().to_string();
    with_pool(&["kv", "load", &file, "--store", "both"]).refused("line 33 of ");
    let mut command = command();
    command.env("XDG_STATE_HOME", log).args(["shell", "--pool", &pool, "--store", "both"]);
    let mut terminal = Terminal::start(command);
    terminal.shows("both> ");
    terminal.types("get key0\r");
    terminal.shows("\"value\"");

    let [mut first, _second] = nodes;
    first.process.kill();
    for n in 0..32 {
        terminal.types(&format!("get key{n}\r"));
    }
    terminal.types("exists nobody\rhelp\r");
    terminal.shows("error: node 0 cannot be reached");
    terminal.shows("list the commands, or explain one");
    let shown = terminal.shown();
    assert!(!shown.contains("former content"), "{shown}");
    std::fs::write(&file, keys.repeat(2)).expect("a file");
    let resumed = with_pool(&["kv", "load", &file, "--store", "both", "--resume"]);
    assert!(!resumed.err.contains("another store"), "{}", resumed.err);
    resumed.refused("node 0 cannot be reached");
}
