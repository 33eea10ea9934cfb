//! Malicious or broken clients against a node over `shm`: the node continues to serve, and keeps no session or
//! descriptor of theirs.

use crate::hostile::in_time;
use crate::hostile::peer::{
    ANSWERED, BYE, HEADER, HELLO, LOOK, NODE, Peer, REFUSED, REQUEST_MAX, call, u32_at,
};
use crate::support::raw_ring::{self, RING, SIZE, Side, Word};
use crate::support::{Node, PATIENCE, command, farside, until};
use farside_fabrics::executor::Core;
use farside_remote::draws::Draws;
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, Memory, NodeId};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;
use rustix::process::Signal;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

#[test]
fn invalid_greetings_are_refused_and_leave_nothing() {
    let node = Node::start();
    let before = node.descriptors();
    let deep = "[".repeat(50_000);
    let long = format!(r#"{{"magic":"{}","version":2}}"#, "\\u0001".repeat(10_000));
    let garbage: [&[u8]; 14] = [
        b"",
        b"\0",
        b"\xff\xfe\xfd",
        b"null",
        b"{}",
        b"[]",
        br#"{"magic":"farside-shm"}"#,
        br#"{"magic":"farside-shm","version":"2"}"#,
        br#"{"magic":"farside-shm","version":-1}"#,
        br#"{"magic":"farside-shm","version":2"#,
        &HELLO[..HELLO.len() - 1],
        deep.as_bytes(),
        long.as_bytes(),
        &[b'a'; 100_000],
    ];
    for greeting in garbage {
        let peer = Peer::connect(node.socket());
        peer.send(greeting).expect("the node listens");
        if let Some((refusal, fds)) = peer.receive() {
            assert!(refusal.starts_with(br#"{"Refusal""#), "{}", refusal.escape_ascii());
            assert!(fds.is_empty(), "a refusal carries no memory");
            assert!(peer.receive().is_none(), "the node hangs up after a refusal");
        }
    }
    for (hello, said) in [
        (r#"{"magic":"farside-shm","version":1}"#, "farside-shm version 1, the node farside-shm version 2"),
        (r#"{"magic":"farside-ring","version":2}"#, "farside-ring version 2, the node farside-shm version 2"),
    ] {
        let peer = Peer::connect(node.socket());
        peer.send(hello.as_bytes()).expect("the node listens");
        let (refusal, _) = peer.receive().expect("a refusal");
        let refusal = String::from_utf8(refusal).expect("text");
        assert!(refusal.contains(said) && refusal.contains("the same release"), "{refusal}");
    }
    node.assert_well(before);
}

/// Runs a client's part in a separate process. Everything that the part leaves behind then belongs to a dead process.
fn played_by_another_process(part: &str, node: &Node) {
    let mut child = std::process::Command::new(std::env::current_exe().expect("this test has a file"));
    child
        .args(["--exact", "hostile::clients::child", "--nocapture"])
        .env(PART, part)
        .env(SOCKET, node.socket());
    let ran = crate::support::run(child, b"");
    assert_eq!(ran.code, Some(0), "{part}: {}{}", ran.text(), ran.err);
    assert!(ran.text().contains("1 passed"), "{part}: {}", ran.text());
}

/// Environment variables for a child: its part, and the socket of the node.
const PART: &str = "FARSIDE_TEST_PART";
const SOCKET: &str = "FARSIDE_TEST_SOCKET";

/// Entry point of child processes. Does nothing when it runs as a test.
#[test]
fn child() {
    let Ok(part) = std::env::var(PART) else { return };
    let socket = PathBuf::from(std::env::var_os(SOCKET).expect("a node"));
    match part.as_str() {
        "says less than a header" => says_less_than_a_header(&socket),
        "says more than a frame" => says_more_than_a_frame(&socket),
        "asks and never listens" => asks_and_never_listens(&socket),
        "sends descriptors" => sends_descriptors(&socket),
        "spoils its rings" => spoils_its_rings(&socket),
        "scribbles over its rings" => scribbles_over_its_rings(&socket),
        "takes every session" => takes_every_session(&socket),
        _ => panic!("unknown part '{part}'"),
    }
}

#[test]
fn truncated_calls_are_refused_or_end_the_connection() {
    let node = Node::start();
    let before = node.descriptors();
    played_by_another_process("says less than a header", &node);
    let peer = Peer::greeted(node.socket());
    let question = br#"{"open_store":{"name":"default"}}"#;
    for len in 0..question.len() {
        let (status, reason) = peer.ask(7, NODE, &question[..len]);
        assert_eq!(status, REFUSED);
        assert!(reason.contains("not understood"), "{reason}");
    }
    assert_eq!(peer.ask(7, NODE, question).0, ANSWERED);
    peer.bye();
    node.assert_well(before);
}

fn says_less_than_a_header(socket: &Path) {
    for len in 0..HEADER {
        let peer = Peer::greeted(socket);
        peer.say(&call(7, NODE, b"")[..len]);
        assert!(peer.hear().is_none(), "{len} bytes are not a call");
    }
}

#[test]
fn frames_beyond_the_maximum_end_the_connection() {
    let node = Node::start();
    let before = node.descriptors();
    played_by_another_process("says more than a frame", &node);
    node.assert_well(before);
}

fn says_more_than_a_frame(socket: &Path) {
    for extra in [1, 7000, 100_000] {
        let peer = Peer::greeted(socket);
        peer.say(&call(1, NODE, &vec![b' '; REQUEST_MAX + extra]));
        assert!(peer.hear().is_none(), "{extra} bytes too many");
    }
    let peer = Peer::greeted(socket);
    let longest = [&vec![b' '; REQUEST_MAX - 11][..], br#""node_info""#].concat();
    assert_eq!(longest.len(), REQUEST_MAX);
    assert_eq!(peer.ask(1, NODE, &longest).0, ANSWERED);
    peer.bye();
}

/// One thread sends all requests within one turn. Together they are many times the rings' capacity.
#[test]
fn concurrent_calls_of_maximum_length_all_get_a_response() {
    let node = Node::start();
    let before = node.descriptors();
    let endpoint = farside_fabrics::shm::connect(node.socket(), NodeId(0)).expect("the node serves");
    endpoint.set_call_timeout(PATIENCE);
    let longest = [&vec![b' '; REQUEST_MAX - 11][..], br#""node_info""#].concat();
    let answered = std::cell::Cell::new(0);
    let mut core = Core::new(&endpoint);
    for _ in 0..48 {
        let (endpoint, longest, answered) = (&endpoint, &longest, &answered);
        core.spawn(async move {
            let mut answer = Vec::new();
            for _ in 0..20 {
                let asked = endpoint.call(NodeId(0), ServiceId::NODE, longest, &mut answer).await;
                asked.expect("an answer");
                assert!(answer.starts_with(br#"{"node_info""#), "{}", answer.escape_ascii());
                answered.set(answered.get() + 1);
            }
        });
    }
    core.run();
    drop(core);
    drop(endpoint);
    assert_eq!(answered.get(), 48 * 20);
    node.assert_well(before);
}

#[test]
fn invalid_requests_are_refused_and_the_session_continues() {
    let node = Node::start();
    let before = node.descriptors();
    let peer = Peer::greeted(node.socket());
    for service in [1, 7, u32::MAX] {
        let (status, reason) = peer.ask(1, service, b"");
        assert_eq!(status, REFUSED);
        assert!(reason.contains(&format!("no store has a service numbered {service}")), "{reason}");
    }
    let name = |name: &str| format!(r#"{{"open_store":{{"name":"{name}"}}}}"#);
    let create = |name: &str, quota: &str, parameters: &str| {
        let rest = format!(r#""kind":"prism-kv","quota":{quota},"parameters":{parameters:?}"#);
        format!(r#"{{"create_store":{{"name":"{name}",{rest}}}}}"#)
    };
    let items = r#"{"items":1,"placement":"hashed"}"#;
    let refused = [
        String::new(),
        "null".into(),
        "[]".into(),
        "\"frob\"".into(),
        "\"frob".into(),
        "{".repeat(50_000),
        "[".repeat(50_000),
        format!("\"{}\"", "x".repeat(50_000)),
        r#"{"open_store":{}}"#.into(),
        r#"{"open_store":{"name":5}}"#.into(),
        r#"{"open_store":{"name":"default","more":1}}"#.into(),
        r#"{"open_store":{"name":"default"},"node_info":null}"#.into(),
        name(""),
        name(&"x".repeat(50_000)),
        name(&"\\u0001".repeat(8000)),
        name("../default"),
        name("none").replace("open_store", "drop_store"),
        name("none").replace("open_store", "store_stat"),
        name("none").replace("open_store", "scan"),
        create("", "1048576", items),
        create(&"x".repeat(50_000), "1048576", items),
        create(&"\\u0001".repeat(8000), "1048576", items),
        create("s", "-1", items),
        create("s", "18446744073709551615", items),
        create("s", "18446744073709551616", items),
        create("s", "0", items),
        create("s", "1", items),
        create("s", "8388608", ""),
        create("s", "8388608", "null"),
        create("s", "8388608", &"[".repeat(20_000)),
        create("s", "8388608", r#"{"items":-1,"placement":"hashed"}"#),
        create("s", "8388608", r#"{"items":18446744073709551615,"placement":"hashed"}"#),
        create("s", "8388608", r#"{"items":1,"placement":"elsewhere"}"#),
        create("s", "8388608", items).replace("prism-kv", "frob"),
    ];
    for (id, question) in (1..).zip(&refused) {
        let (status, reason) = peer.ask(id, NODE, question.as_bytes());
        assert_eq!(status, REFUSED, "{}: {reason}", &question[..question.len().min(200)]);
        assert!(!reason.is_empty() && reason.len() < 5000, "{} bytes: {:.200}", reason.len(), reason);
    }
    // A second hello counts as a bell.
    peer.send(HELLO).expect("the node listens");
    let (status, info) = peer.ask(u64::MAX, NODE, b"\"node_info\"");
    assert!(status == ANSWERED && info.contains(r#""sessions":1"#), "{info}");
    let listed = node.run(["store", "list"]).done();
    assert_eq!(listed.text(), "default\tprism-kv\t48.0 MiB\ttable 1, of 131072 slots\n");
    peer.bye();
    node.assert_well(before);
}

#[test]
fn a_thousand_silent_connections_leave_nothing() {
    let node = Node::start();
    let before = node.descriptors();
    for _ in 0..1000 {
        drop(Peer::connect(node.socket()));
    }
    node.assert_well(before);
    // The same with connections that stay open.
    let silent: Vec<Peer> = (0..100).map(|_| Peer::connect(node.socket())).collect();
    assert_eq!(node.run(["kv", "put", "k", "v"]).done().code, Some(0));
    for peer in &silent {
        assert!(peer.receive().is_none(), "the node hangs up on a silent connection");
    }
    node.assert_well(before);
}

/// The engine must wake by itself, because no other client sends messages.
#[test]
fn a_silent_ring_connection_is_closed_even_if_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let ring = folder.path().join("ring");
    let node = Node::with(&["--memory", "16MiB", "--listen", &format!("ring:{}", ring.display())]);
    let before = node.descriptors();
    let silent = Peer::connect(&ring);
    assert!(silent.receive().is_none(), "the engine hangs up on a silent connection");
    until("no extra descriptor is left", || node.descriptors() <= before);
}

#[test]
fn ten_thousand_unread_responses_do_no_harm() {
    let node = Node::start();
    let before = node.descriptors();
    played_by_another_process("asks and never listens", &node);
    node.assert_well(before);
}

fn asks_and_never_listens(socket: &Path) {
    let url = format!("shm:{}", socket.display());
    let peer = Peer::greeted(socket);
    for id in 0..10_000 {
        let question: &[u8] = match id % 3 {
            0 => br#"{"store_stat":{"name":"default"}}"#,
            1 => br#"{"scan":{"name":"default"}}"#,
            _ => b"frob",
        };
        assert!(peer.say(&call(id, NODE, question)), "the node reads requests even if no response is read");
        if id % 2500 == 0 {
            farside(["kv", "put", "k", "v", "--pool", &url]).done(); // The node serves others meanwhile.
        }
    }
    farside(["kv", "get", "k", "--pool", &url]).done();
}

#[test]
fn descriptors_that_a_client_sends_are_not_kept() {
    let node = Node::start();
    let before = node.descriptors();
    played_by_another_process("sends descriptors", &node);
    node.assert_well(before);
}

fn sends_descriptors(socket: &Path) {
    let null = File::open("/dev/null").expect("a device");
    let many = [null.as_fd(); 8];
    let mut before_greeting = Peer::connect(socket);
    before_greeting.send_with(HELLO, &many).expect("the node listens");
    before_greeting.is_welcomed();
    for id in 0..50 {
        for count in [1, 2, 3, 8] {
            before_greeting.send_with(&[LOOK], &many[..count]).expect("the node listens");
            assert_eq!(before_greeting.ask(id, NODE, b"\"node_info\"").0, ANSWERED);
        }
    }
    // A client sends its own socket: if the node kept it, the connection would never close.
    let itself = Peer::greeted(socket);
    itself.send_with(&[LOOK], &[itself.socket.as_fd()]).expect("the node listens");
}

#[test]
fn messages_after_bye_are_ignored() {
    let node = Node::start();
    let before = node.descriptors();
    let peer = Peer::greeted(node.socket());
    peer.say(&call(1, NODE, b"\"node_info\""));
    peer.send(&[BYE]).expect("the node listens");
    until("the node hangs up", || peer.hear().is_none());
    peer.say(&call(3, NODE, br#"{"drop_store":{"name":"default"}}"#));
    assert!(matches!(peer.send(&[LOOK]), Err(Errno::PIPE | Errno::CONNRESET)));
    node.assert_well(before);
    // BYE alone is not a greeting.
    let rude = Peer::connect(node.socket());
    rude.send(&[BYE]).expect("the node listens");
    assert!(rude.receive().expect("a refusal").0.starts_with(br#"{"Refusal""#));
    node.assert_well(before);
}

#[test]
fn the_exit_of_a_process_frees_all_of_its_sessions() {
    let node = Node::start();
    let before = node.descriptors();
    played_by_another_process("takes every session", &node);
    node.assert_well(before);
}

fn takes_every_session(socket: &Path) {
    const SESSIONS_MAX: usize = 1024;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let limit = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).expect("it may be raised");
    let mut peers: Vec<Peer> = (0..SESSIONS_MAX).map(|_| Peer::greeted(socket)).collect();
    let one_more = Peer::connect(socket);
    one_more.send(HELLO).expect("the node listens");
    let (refusal, _) = one_more.receive().expect("a refusal");
    assert!(String::from_utf8_lossy(&refusal).contains("the maximum"));
    let url = format!("shm:{}", socket.display());
    farside(["info", "--pool", &url]).refused("end another client first");
    // A client that hangs up without BYE keeps its session, because it may still use the memory. BYE frees it.
    drop(peers.pop());
    peers.pop().expect("many are left").bye();
    farside(["info", "--pool", &url]).done();
}

#[test]
fn the_session_of_a_killed_client_ends() {
    let node = Node::start();
    let before = node.descriptors();
    for _ in 0..20 {
        let mut client = command();
        // The client waits for a value on standard input, with its session open.
        client.args(["kv", "put", "k", "--pool", &node.url()]);
        client.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut client = client.spawn().expect("the command starts");
        until("the client is connected", || node.sessions() > 0);
        client.kill().and_then(|()| client.wait()).expect("it is our child");
        until("the node ends its session", || node.sessions() == 0);
    }
    node.assert_well(before);
}

#[test]
fn a_stopped_node_is_reported_and_serves_after_it_continues() {
    let node = Node::start();
    let before = node.descriptors();
    node.run(["kv", "put", "k", "v"]).done();
    node.process.signal(Signal::STOP);
    let refused = node.run(["kv", "get", "k"]).refused("is stopped");
    assert!(refused.err.contains(&format!("kill -CONT {}", node.process.pid())), "{}", refused.err);
    in_time(&refused);
    // Fills the listener's backlog.
    let mut waiting = Vec::new();
    loop {
        let socket = raw_ring::socket();
        rustix::io::ioctl_fionbio(&socket, true).expect("a socket");
        match rustix::net::connect(&socket, &SocketAddrUnix::new(node.socket()).expect("a name")) {
            Ok(()) => waiting.push(socket),
            Err(errno) => break assert_eq!(errno, Errno::AGAIN),
        }
    }
    in_time(&node.run(["kv", "get", "k"]).refused("accepts no more clients"));
    node.process.signal(Signal::CONT);
    assert_eq!(node.run(["kv", "get", "k"]).done().out, b"v");
    drop(waiting);
    node.assert_well(before);
}

#[test]
fn a_hello_and_a_hang_up_leave_nothing_while_the_process_lives() {
    let node = Node::start();
    let before = node.descriptors();
    for _ in 0..3 {
        // The client has hung up before its welcome is sent.
        node.process.signal(Signal::STOP);
        for _ in 0..100 {
            Peer::connect(node.socket()).send(HELLO).expect("the backlog has capacity");
        }
        node.process.signal(Signal::CONT);
        node.assert_well(before);
        // The client never reads its welcome.
        for _ in 0..100 {
            let peer = Peer::connect(node.socket());
            peer.send(HELLO).expect("the node listens");
            peer.wait(PollFlags::IN);
        }
        for _ in 0..100 {
            Peer::connect(node.socket()).send(HELLO).expect("the node listens");
        }
        node.assert_well(before);
    }
}

#[test]
fn bye_with_unread_responses_leaves_nothing() {
    let node = Node::start();
    let before = node.descriptors();
    for _ in 0..20 {
        let peer = Peer::greeted(node.socket());
        // The node rings the client's bell for the response, and the client does not read that either.
        peer.ring().memory.word(Word::Wish(Side::Client)).store(1, Ordering::SeqCst);
        peer.say(&call(1, NODE, b"\"node_info\""));
        peer.wait(PollFlags::IN);
        node.process.signal(Signal::STOP);
        peer.send(&[BYE]).expect("the socket has capacity");
        drop(peer);
        node.process.signal(Signal::CONT);
    }
    node.assert_well(before);
}

#[test]
fn calls_followed_by_bye_delay_no_other_client() {
    const STAT: &[u8] = br#"{"store_stat":{"name":"default"}}"#;
    let node = Node::start();
    let before = node.descriptors();
    for _ in 0..40 {
        let peer = Peer::greeted(node.socket());
        (0..256).for_each(|id| assert!(peer.say(&call(id, NODE, STAT))));
        peer.send(&[BYE]).expect("the node listens");
    }
    in_time(&node.run(["kv", "stat"]).done());
    node.assert_well(before);
}

#[test]
fn a_drop_that_waits_for_a_client_delays_no_other_client() {
    let node = Node::start();
    node.run(["store", "create", "left", "--quota", "4MiB", "--items", "100"]).done();
    // A session of this process that never ends its turn.
    let endpoint = farside_fabrics::shm::connect(node.socket(), NodeId(0)).expect("the node serves");
    let turn_at = farside_remote::arena::session::turn_at(endpoint.session().slot);
    let turn = |turn: u64| {
        let Ok(()) = endpoint.memory().write(turn_at, &turn.to_le_bytes());
    };
    turn(1);
    let dropping = Peer::greeted(node.socket());
    dropping.say(&call(1, NODE, br#"{"drop_store":{"name":"left"}}"#));
    until("the drop has begun", || !node.run(["store", "list"]).done().text().contains("left"));
    node.run(["store", "create", "next", "--quota", "4MiB", "--items", "100"]).done();
    let stat = node.run(["kv", "stat"]).done();
    let output = format!("{}{}", stat.text(), stat.err);
    assert!(output.contains(&std::process::id().to_string()), "the process in the turn is named: {output}");
    turn(2);
    let answered = dropping.hear().expect("an answer");
    assert_eq!(u32_at(&answered, 12), ANSWERED);
    dropping.bye();
}

/// One client floods the socket with messages and the memory with wishes, then the node is stopped. Other clients never
/// wait.
#[test]
fn floods_of_messages_and_wishes_delay_no_other_client() {
    let node = Node::start();
    let before = node.descriptors();
    let other = farside::connect(&node.url()).and_then(|pool| pool.open("default")).expect("a store");
    other.put("k", "0").wait().expect("the node serves");
    let peer = Peer::greeted(node.socket());
    let floods = AtomicBool::new(true);
    let (memory, socket) = (&peer.ring().memory, &peer.socket);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut turn = 0;
            while floods.load(Ordering::Relaxed) {
                turn += 1;
                // Every byte but BYE, which would end the connection.
                let word = if turn as u8 == BYE { LOOK } else { turn as u8 };
                raw_ring::send(socket, &[word], &[]);
                memory.word(Word::Wish(Side::Engine)).store(turn % 5, Ordering::SeqCst);
                memory.word(Word::Wish(Side::Client)).store(u64::MAX, Ordering::SeqCst);
            }
        });
        for _ in 0..5 {
            in_time(&node.run(["info"]).done());
        }
        floods.store(false, Ordering::Relaxed);
    });
    peer.ring().bell();
    assert_eq!(peer.ask(1, NODE, b"\"node_info\"").0, ANSWERED);
    // A stopped node reads nothing.
    node.process.signal(Signal::STOP);
    let (sender, done) = mpsc::channel();
    std::thread::spawn(move || {
        // Enough puts that the client rings the node's bell.
        for round in 0..600u32 {
            other.put("k", round.to_le_bytes()).wait().expect("the memory stays mapped");
        }
        sender.send(other)
    });
    let other = done.recv_timeout(PATIENCE);
    node.process.signal(Signal::CONT);
    drop(other.expect("the client does not wait for the node"));
    peer.bye();
    node.assert_well(before);
}

#[test]
fn corrupted_rings_affect_only_their_own_calls() {
    let node = Node::start();
    let before = node.descriptors();
    for part in ["spoils its rings", "scribbles over its rings"] {
        played_by_another_process(part, &node);
        node.assert_well(before);
    }
}

fn spoils_its_rings(socket: &Path) {
    let url = format!("shm:{}", socket.display());
    let tails: [fn(u64) -> u64; 8] = [
        |at| at + 8,
        |at| at - 16,
        |at| at + RING + 16,
        |at| at.wrapping_sub(RING),
        |at| at ^ 1 << 63,
        |_| 0,
        |_| u64::MAX,
        |_| u64::MAX - 15,
    ];
    for (nth, tail) in tails.into_iter().enumerate() {
        let peer = Peer::greeted(socket);
        assert_eq!(peer.ask(1, NODE, b"\"node_info\"").0, ANSWERED);
        peer.ring().publish(tail(peer.ring().written.get()));
        assert!(peer.hear().is_none(), "tail {nth}");
        farside(["info", "--pool", &url]).done();
    }
    for (len, published) in [(13, 16), (REQUEST_MAX as u64 + 17, RING), (1 << 31, RING), (u64::MAX, 16)] {
        let peer = Peer::greeted(socket);
        peer.ring().memory.of_ring(Side::Client, 0).store(len, Ordering::SeqCst);
        peer.ring().publish(published);
        assert!(peer.hear().is_none(), "{len} bytes in {published}");
        farside(["info", "--pool", &url]).done();
    }
    let peer = Peer::greeted(socket);
    for size in [0, SIZE - 4096, SIZE + 4096] {
        assert!(rustix::fs::ftruncate(&peer.ring().fd, size).is_err(), "the rings cannot be truncated");
    }
    assert_eq!(peer.ask(1, NODE, b"\"node_info\"").0, ANSWERED);
}

fn scribbles_over_its_rings(socket: &Path) {
    let url = format!("shm:{}", socket.display());
    let mut ended = 0;
    for seed in 0..20_u64 {
        let peer = Peer::greeted(socket);
        let mut draws = Draws(seed);
        for turn in 0..20_000 {
            let random = draws.next();
            let side = if random >> 60 & 1 == 0 { Side::Client } else { Side::Engine };
            let word = [Word::Tail(side), Word::Head(side), Word::Wish(side)][(random >> 32) as usize % 3];
            let word = peer.ring().memory.word(word);
            match random % 6 {
                0 => word.store(random, Ordering::SeqCst),
                1 => drop(word.fetch_add(16, Ordering::SeqCst)),
                2 => word.store(RING, Ordering::SeqCst),
                3 => word.store(0, Ordering::SeqCst),
                4 => peer.ring().memory.of_ring(side, random >> 8 & !7).store(24, Ordering::SeqCst),
                _ => peer.ring().bell(),
            }
            if turn % 5000 == 0 {
                farside(["info", "--pool", &url]).done();
            }
        }
        ended += usize::from(peer.ring().is_hung_up());
    }
    assert!(ended > 0, "the node hung up on no peer");
}

#[test]
fn two_nodes_on_copies_of_one_memory_file_stay_apart() {
    let first = tempfile::tempdir().expect("a folder");
    let file = |name: &str| first.path().join(name).to_str().expect("a name").to_owned();
    let serve = |name: &str| {
        Node::with(&[
            "--memory",
            "32MiB",
            "--store",
            "default",
            "--quota",
            "8MiB",
            "--memory-file",
            &file(name),
        ])
    };
    drop(serve("original"));
    std::fs::copy(file("original"), file("copy")).expect("the disk has capacity");
    let nodes = [serve("original"), serve("copy")];
    let mut clients = nodes.each_ref().map(|node| {
        let pool = farside::connect(&node.url()).expect("a node");
        farside::local::Client::open(&pool, "default").expect("a store")
    });
    for (client, value) in clients.iter_mut().zip([b"original", &b"copy"[..]]) {
        client.put(b"k", value).expect("the node serves");
    }
    for (node, value) in nodes.iter().zip([b"original", &b"copy"[..]]) {
        assert_eq!(node.run(["kv", "get", "k"]).done().out, value);
    }
}

/// Clients for which the node has no descriptor get an error, the node's log warns once, and afterwards the node serves
/// other clients.
#[test]
fn clients_beyond_the_descriptor_limit_are_refused() {
    const WARNING: &str = "raise 'ulimit -n'";
    let limited = |serve: std::process::Command| {
        let mut shell = std::process::Command::new("/bin/sh");
        shell.env_clear().args(["-c", "ulimit -n 64 && exec \"$@\"", "sh"]);
        shell.arg(serve.get_program()).args(serve.get_args());
        shell
    };
    let node = Node::within(limited, &["--memory", "96MiB", "--store", "default", "--quota", "48MiB"]);
    let before = node.descriptors();
    for round in 1..=2 {
        let silent: Vec<Peer> = (0..100).map(|_| Peer::connect(node.socket())).collect();
        for peer in &silent {
            peer.wait(PollFlags::IN);
        }
        assert_eq!(node.process.log().matches(WARNING).count(), round, "{}", node.process.log());
        drop(silent);
        until("the node serves others", || node.run(["kv", "put", "k", "v"]).code == Some(0));
        node.assert_well(before);
    }
}

#[test]
fn processes_in_different_pid_namespaces_are_refused() {
    let apart = |serve: std::process::Command| {
        let mut unshare = std::process::Command::new("/usr/bin/unshare");
        unshare.env_clear().args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child=KILL"]);
        unshare.arg(serve.get_program()).args(serve.get_args());
        unshare
    };
    let mut probe = apart(std::process::Command::new("/bin/true"));
    if !probe.status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: this system does not permit a new pid namespace");
        return;
    }
    // The node does not see its client.
    let node = Node::within(apart, &["--memory", "32MiB"]);
    in_time(&node.run(["info"]).refused("pid namespace"));
    // The client does not see its node.
    let node = Node::start();
    let mut info = command();
    info.args(["info", "--pool", &node.url()]);
    in_time(&crate::support::run(apart(info), b"").refused("pid namespace"));
    let before = node.descriptors();
    node.assert_well(before);
}

#[test]
fn a_node_does_not_take_over_memory_its_own_process_uses() {
    use farside_fabrics::memory::Mapping;
    use farside_node::host::{BindError, Host, Options};
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("node.sock");
    let serve = |take_over: bool, evict: bool| {
        // A child that another test is starting inherits the lock until it calls exec.
        let mut memory = None;
        until("no process holds the lock", || {
            memory = Mapping::open(&folder.path().join("memory"), 8 << 20).ok();
            memory.is_some()
        });
        let (memory, _) = memory.expect("as in the loop above");
        let socket = Some(socket.clone());
        Host::start(memory, Vec::new(), Options { socket, take_over, evict, ..Options::default() })
    };
    let host = serve(false, false).expect("the node serves");
    let endpoint = farside_fabrics::shm::connect(&socket, NodeId(0)).expect("a session");
    drop(host);
    for evict in [false, true] {
        let refused = serve(true, evict).map(drop).expect_err("the client may be in the middle of a chain");
        assert!(matches!(refused, BindError::OwnClients), "{refused}");
        assert!(refused.to_string().contains("this process"), "{refused}");
    }
    drop(endpoint);
    drop(serve(true, false).expect("no client uses the memory any more"));
}
