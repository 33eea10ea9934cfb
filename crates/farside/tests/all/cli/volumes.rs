//! `volume` and `bench blocks`: volumes over the processes of several nodes, some of which die.

use crate::cli::{KIB, MIB, bytes};
use crate::support::{Process, Ran, command, farside, run, serve, until};
use farside::volume::{Volume, WriterIds};
use farside_fabrics::executor::block_on;
use farside_systems::blocks::prism_rs;
use farside_systems::members::{self, New};
use farside_systems::system::Sizing;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::rc::Rc;
use tempfile::TempDir;

/// Several nodes, and the pool of all.
struct Pool {
    nodes: Vec<Process>,
    urls: Vec<String>,
    folder: TempDir,
    /// Memory of each node.
    memory: &'static str,
}

impl Pool {
    /// Starts nodes at sockets of this host.
    fn start(count: usize, memory: &'static str) -> Pool {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = |number: usize| folder.path().join(format!("node-{number}.sock"));
        let start = |number: usize| {
            let log = folder.path().join(format!("log-{number}"));
            let node = serve(&socket(number), &["--memory", memory], log);
            node.line();
            node
        };
        let nodes = (0..count).map(start).collect();
        let urls = (0..count).map(|number| format!("shm:{}", socket(number).display())).collect();
        Pool { nodes, urls, folder, memory }
    }

    /// Starts three nodes that serve TCP and keep their memory in files.
    fn over_tcp(memory: &'static str) -> Pool {
        let folder = tempfile::tempdir().expect("a folder");
        let mut pool = Pool { nodes: Vec::new(), urls: Vec::new(), folder, memory };
        for number in 0..3 {
            let (node, url) = pool.serve_tcp(number, "tcp://127.0.0.1:0");
            pool.nodes.push(node);
            pool.urls.push(url);
        }
        pool
    }

    fn serve_tcp(&self, number: usize, listen: &str) -> (Process, String) {
        let at = |name: &str| self.folder.path().join(format!("{name}-{number}"));
        let file = at("memory").display().to_string();
        let node = serve(
            &at("sock"),
            &["--memory", self.memory, "--memory-file", &file, "--listen", listen],
            at("log"),
        );
        node.line();
        let url = node.line().split_once(" at ").expect("an engine").1.to_owned();
        (node, url)
    }

    /// Kills a node, and starts it again with its memory.
    fn restart(&mut self, number: usize) {
        self.nodes[number].kill();
        let (node, _) = self.serve_tcp(number, &self.urls[number]);
        self.nodes[number] = node;
    }

    fn url(&self) -> String {
        self.urls.join(",")
    }

    fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path
    }

    /// Runs `farside` with these arguments and this pool.
    #[track_caller]
    fn run(&self, arguments: &[&str]) -> Ran {
        farside([arguments, &["--pool", &self.url()]].concat())
    }

    /// Runs `farside volume write NAME --offset OFFSET` with these bytes on standard input.
    #[track_caller]
    fn write(&self, name: &str, offset: usize, bytes: &[u8]) -> Ran {
        let mut write = command();
        write.args(["volume", "write", name, "--offset", &offset.to_string(), "--pool", &self.url()]);
        run(write, bytes)
    }

    #[track_caller]
    fn read(&self, name: &str, offset: usize, length: usize) -> Vec<u8> {
        let (offset, length) = (offset.to_string(), length.to_string());
        self.run(&["volume", "read", name, "--offset", &offset, "--length", &length]).done().out
    }

    fn open(&self) -> farside::Pool {
        farside::connect(&self.url()).expect("the nodes serve")
    }

    /// Names of the stores of each node.
    fn stores(&self) -> Vec<Vec<String>> {
        let names = |node: farside::Pool| {
            let stores = node.stores().expect("the node responds");
            stores.into_iter().map(|store| store.name).collect()
        };
        self.open().nodes().map(names).collect()
    }
}

#[test]
fn a_volume_is_created_used_and_dropped() {
    let pool = Pool::start(3, "24MiB");
    let created = pool.run(&["volume", "create", "disk", "--size", "1000KiB", "--quota", "8MiB"]).done();
    assert_eq!(
        created.text(),
        "volume 'disk' has 1000.0 KiB in 250 blocks of 4.0 KiB, 3 replicas in 1 group; 8.0 MiB of memory on each of 3 \
         nodes\n"
    );
    pool.run(&["volume", "create", "disk", "--size", "1MiB"])
        .refused("there is a store or volume 'disk' already");
    let listed = pool.run(&["volume", "list", "--json"]).done().json();
    assert_eq!((&listed["size_bytes"], &listed["state"]), (&(1000 * KIB).into(), &"whole".into()));

    // Bytes that begin and end within a block, and their neighbours.
    let written = bytes(300_000, 1);
    pool.write("disk", 5000, &written).done();
    assert_eq!(pool.read("disk", 5000, written.len()), written);
    assert_eq!(pool.read("disk", 0, 5000), vec![0; 5000]);
    assert_eq!(pool.read("disk", 305_000, 9000), vec![0; 9000]);
    pool.write("disk", 5003, b"abc").done();
    assert_eq!(pool.read("disk", 5002, 5), [&written[2..3], b"abc", &written[6..7]].concat());

    let (input, output) = (pool.file("input", &written), pool.folder.path().join("output"));
    let (input, output) = (input.display().to_string(), output.display().to_string());
    let end = (1000 * KIB - written.len()).to_string();
    let wrote = pool.run(&["volume", "write", "disk", "--offset", &end, "--input", &input, "--json"]).done();
    assert_eq!(wrote.json()["bytes"], written.len());
    pool.run(&["volume", "read", "disk", "--offset", &end, "--output", &output, "--quiet"]).done();
    assert_eq!(std::fs::read(&output).expect("a file"), written);

    pool.run(&["volume", "write", "disk", "--offset", "800KiB", "--input", &input])
        .refused("does not fit into it");
    pool.write("disk", 1000 * KIB - 1, b"ab").refused("does not fit into it");
    pool.run(&["volume", "read", "disk", "--offset", "999KiB", "--length", "2KiB"])
        .refused("not all within it");

    pool.run(&["volume", "read", "disk", "--json", "--output", "-"]).refused("name a file with --output");

    let stat = pool.run(&["volume", "stat", "disk", "--json"]).done().json();
    let replica = &stat["groups"][0]["replicas"][0];
    assert_eq!((&replica["reachable"], &stat["groups"][0]["blocks"]), (&true.into(), &250.into()));
    assert!(replica["blocks_written"].as_u64().is_some_and(|blocks| (148..=152).contains(&blocks)), "{stat}");
    assert!(pool.run(&["volume", "stat", "disk"]).done().text().contains("replica 2: "));
    assert!(pool.run(&["store", "list"]).done().text().contains("volume of 250 blocks of 4.0 KiB"));
    pool.run(&["kv", "get", "x", "--store", "disk"])
        .refused("is a block store, not a key-value store: use 'farside volume'");

    assert_eq!(pool.run(&["volume", "drop", "disk"]).done().text(), "volume 'disk' is dropped\n");
    for action in ["drop", "stat", "read", "scrub"] {
        pool.run(&["volume", action, "disk"]).refused("there is no volume 'disk' in the pool");
    }
    assert!(pool.stores().iter().all(Vec::is_empty));
}

#[test]
fn impossible_volumes_are_refused_with_the_remedy() {
    let pool = Pool::start(3, "24MiB");
    let create = |arguments: &[&str]| pool.run(&[&["volume", "create", "v"], arguments].concat());
    create(&["--size", "0"]).refused("give a --size such as 1GiB");
    create(&["--size", "1GiB"]).refused("give it a smaller --size or --quota");
    create(&["--size", "1MiB", "--block", "1000"]).refused("give a multiple of 512");
    create(&["--size", "1MiB", "--replicas", "2"]).refused("2 replicas are not possible: give 3");
    create(&["--size", "1MiB", "--replicas", "5"]).refused("the pool has 3: name more nodes with --pool");
    create(&["--size", "1MiB", "--groups", "2"])
        .refused("2 groups of 3 replicas are not possible on 3 nodes");
    create(&["--size", "1MiB", "--kind", "pilaf"]).refused("'pilaf' is no kind of block store");
    create(&["--size", "16777216TiB"]).refused("is not a number of bytes");
    create(&["--size", "16777215TiB"]).refused("give a smaller --size");
    let long = "v".repeat(51);
    pool.run(&["volume", "create", &long, "--size", "1MiB"])
        .refused("the name has 51 characters: give at most 50");
    pool.run(&["volume", "create", "a/b", "--size", "1MiB"]).refused("use 1 to 64 letters");
    assert!(pool.stores().iter().all(Vec::is_empty));
    pool.run(&["store", "create", "keys", "--quota", "4MiB"]).done();
    pool.run(&["volume", "drop", "keys"]).refused("is a key-value store and not a volume");
    pool.run(&["volume", "read", "keys"]).refused("is a key-value store and not a volume");
    // One node is enough for one replica.
    let alone = farside(
        ["volume", "create", "v", "--size", "64KiB", "--replicas", "1", "--quota", "4MiB", "--pool"]
            .into_iter()
            .chain([&*pool.urls[1]]),
    );
    assert!(alone.done().text().contains("1 replica in 1 group"));
}

/// A volume of one replica with this number of writer ids, on a pool of one node.
fn create_with_ids(pool: &Pool, name: &str, ids: u32) {
    let endpoint = Rc::new(pool.open().endpoint_here().expect("a session"));
    let sizing = Sizing { items: Some(8), value_len: 4096, writers: Some(ids), ..Sizing::default() };
    let (name, kind) = (name.to_owned(), prism_rs::KIND.to_owned());
    let new = New { name, kind, sizing, quota: 4 << 20, members: 1 };
    let created = block_on(&endpoint, members::create(&endpoint, 1, &new, [1, 2]));
    assert_eq!(created.expect("the node has memory").len(), 1);
}

#[test]
fn a_volume_warns_of_few_writer_ids_and_then_refuses_new_writers() {
    let pool = Pool::start(1, "16MiB");
    create_with_ids(&pool, "v", 10);
    let mut kept = Volume::open(&pool.open(), "v").expect("the volume");
    kept.write_at(0, b"0").expect("the first writer");
    let stat = || pool.run(&["volume", "stat", "v", "--json"]).done();
    for claimed in 2..=10 {
        let wrote = pool.write("v", claimed, b"x").done();
        let warning = format!("{claimed} of 10 writer ids of volume 'v' are claimed");
        assert_eq!(wrote.err.contains(&warning), claimed >= 9, "{claimed}: {}", wrote.err);
        let stat = stat();
        let ids = &stat.json()["groups"][0]["writer_ids"];
        assert_eq!((&ids["claimed"], &ids["of"]), (&claimed.into(), &10.into()));
        assert_eq!(stat.err.contains(&warning), claimed >= 9, "{claimed}: {}", stat.err);
    }
    pool.write("v", 0, b"y")
        .refused("all 10 writer ids of the block store were claimed, and nothing was written");
    assert!(pool.run(&["volume", "stat", "v"]).done().text().contains("10 of 10 writer ids claimed"));
    assert_eq!(pool.read("v", 0, 4), b"0\0xx");
    kept.write_at(0, b"z").expect("it has an id");
    assert_eq!(pool.read("v", 0, 1), b"z");
    let groups = kept.writer_ids().expect("the node answers");
    assert_eq!(groups, [Some(WriterIds { claimed: 10, of: 10 })]);
}

#[test]
fn a_refusal_for_lack_of_memory_names_the_memory_that_suffices() {
    const SIZE: &str = "16MiB";
    let memory = |mib: u64| -> &'static str { format!("{mib}MiB").leak() };
    let create = |pool: &Pool| pool.run(&["volume", "create", "v", "--size", SIZE]);
    let short = create(&Pool::start(3, memory(24)));
    let missing = short.err.split("serve ").nth(1).and_then(|rest| rest.split(' ').next());
    let missing: u64 = missing.and_then(|number| number.parse().ok()).expect("a number of MiB");
    short.refused("MiB on each of 3 nodes, and shm:");
    create(&Pool::start(3, memory(24 + missing - 1))).refused(": serve 1 MiB more --memory there");
    create(&Pool::start(3, memory(24 + missing))).done();
}

#[test]
fn blocks_are_striped_over_groups_and_no_half_volume_is_used() {
    let pool = Pool::start(6, "16MiB");
    let create =
        || pool.run(&["volume", "create", "v", "--size", "50KiB", "--quota", "4MiB", "--json"]).done().json();
    assert_eq!(create()["groups"], 2);
    let stores = pool.stores();
    assert!(stores.iter().all(|names| names.len() == 1), "each group has nodes of its own: {stores:?}");
    assert_eq!(stores.iter().filter(|names| names[0] == "v").count(), 3);
    let part = stores.iter().flatten().find(|name| *name != "v").expect("the other group").clone();
    let written = bytes(30_000, 2);
    pool.write("v", 1234, &written).done();
    assert_eq!(pool.read("v", 1234, written.len()), written);
    let stat = pool.run(&["volume", "stat", "v", "--json"]).done().json();
    let blocks = |group: usize| stat["groups"][group]["blocks"].as_u64();
    assert_eq!((blocks(0), blocks(1)), (Some(7), Some(6)), "13 blocks in turn");
    for store in ["v", &part] {
        pool.run(&["store", "drop", store]).refused("drop the volume with 'farside volume drop v'");
    }

    // A client has dropped the head, and died.
    assert!(pool.open().drop_store("v").expect("the nodes respond").is_empty());
    pool.run(&["volume", "read", "v"]).refused("there is no volume 'v'");
    assert!(pool.run(&["volume", "list"]).done().text().contains("'farside volume drop v' frees it"));
    // What it left is not in the way of another volume, which reads as zeros.
    create();
    assert_eq!(pool.read("v", 0, 50 * KIB), vec![0; 50 * KIB]);
    pool.run(&["volume", "drop", "v"]).done();
    assert!(pool.stores().iter().all(Vec::is_empty));

    // A client has dropped a part of a volume that another one was creating.
    create();
    let part = pool.stores().into_iter().flatten().find(|name| name != "v").expect("the other group");
    pool.open().drop_store(&part).expect("the nodes respond");
    pool.run(&["volume", "read", "v"]).refused("lacks its store");
    assert!(pool.run(&["volume", "list"]).done().text().contains("1 groups were not found"));
    pool.run(&["volume", "drop", "v"]).done();
    assert!(pool.stores().iter().all(Vec::is_empty));

    // A volume whose head does not respond is not taken for something left: its other stores stay.
    create();
    let stores = pool.stores();
    for (node, names) in pool.nodes.iter().zip(&stores) {
        if names[0] == "v" {
            node.signal(rustix::process::Signal::KILL);
        }
    }
    until("the head is gone", || pool.open().stores().is_ok_and(|stores| stores.len() == 1));
    assert!(pool.run(&["volume", "list"]).done().text().contains("1 groups were not found"));
    assert_eq!(pool.run(&["volume", "drop", "v"]).code, Some(2));
    assert_eq!(pool.open().stores().expect("three nodes respond").len(), 1);
    pool.run(&["volume", "drop", "v", "--forget"]).done();
    assert_eq!(pool.open().stores().expect("three nodes respond").len(), 0);
}

#[test]
fn writes_go_on_when_a_node_is_killed_and_scrub_repairs_it() {
    let mut pool = Pool::over_tcp("24MiB");
    pool.run(&["volume", "create", "v", "--size", "4MiB", "--quota", "12MiB"]).done();
    let written = bytes(4 * MIB, 3);
    let mut write = command();
    write.args(["volume", "write", "v", "--pool", &pool.url()]);
    let log = std::fs::File::create(pool.folder.path().join("log-of-write")).expect("a file");
    let mut write = write.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log).spawn().expect("it starts");
    let mut input = write.stdin.take().expect("piped");
    let (first, second) = written.split_at(2 * MIB);
    input.write_all(first).expect("it reads");
    pool.nodes[0].kill();
    input.write_all(second).expect("it reads");
    drop(input);
    let status = write.wait().expect("it ends");
    let log = std::fs::read_to_string(pool.folder.path().join("log-of-write")).expect("text");
    assert!(status.success(), "{log}");
    assert_eq!(pool.read("v", 0, written.len()), written);

    let stat = pool.run(&["volume", "stat", "v", "--json"]).done().json();
    let reachable = |replica: &Value| replica["reachable"] == true;
    let replicas = stat["groups"][0]["replicas"].as_array().expect("replicas");
    assert_eq!(replicas.iter().filter(|replica| reachable(replica)).count(), 2, "{stat}");
    let scrub = |pool: &Pool| pool.run(&["volume", "scrub", "v", "--json", "--quiet"]);
    let incomplete = scrub(&pool);
    assert_eq!((incomplete.code, incomplete.json()["incomplete"].as_u64()), (Some(2), Some(1024)));
    assert!(incomplete.err.contains("1024 blocks were not compared at all replicas"), "{}", incomplete.err);

    pool.restart(0);
    let repaired = scrub(&pool).done().json();
    assert_eq!(repaired["blocks"], 1024);
    assert!(repaired["repaired"].as_u64().is_some_and(|blocks| blocks > 100), "{repaired}");
    let again = scrub(&pool).done().json();
    assert_eq!((&again["repaired"], &again["damaged"]), (&0.into(), &0.into()));
    // Now the restarted node and one other are enough.
    pool.nodes[1].kill();
    assert_eq!(pool.read("v", 0, written.len()), written);
    pool.nodes[2].kill();
    let lost = pool.run(&["volume", "read", "v", "--length", "1"]);
    assert_eq!(lost.code, Some(2), "one replica is no majority");
}

#[test]
fn a_replica_moves_to_another_node_and_a_wiped_one_is_healed() {
    let mut pool = Pool::over_tcp("24MiB");
    pool.run(&["volume", "create", "v", "--size", "1MiB", "--quota", "8MiB"]).done();
    let written = bytes(MIB, 4);
    pool.write("v", 0, &written).done();
    pool.run(&["volume", "scrub", "v", "--quiet"]).done();
    // The node of replica 0 is gone for good, and another one takes its place.
    pool.nodes[0].kill();
    let (node, url) = pool.serve_tcp(3, "tcp://127.0.0.1:0");
    pool.run(&["volume", "replace", "v", "--replica", "3", "--by", &url]).refused("has no replica 3");
    pool.run(&["volume", "replace", "v", "--group", "1", "--replica", "0", "--by", &url])
        .refused("has no group 1");
    let replaced =
        pool.run(&["volume", "replace", "v", "--replica", "0", "--by", &url, "--json", "--quiet"]).done();
    let replaced = replaced.json();
    assert_eq!((&replaced["configuration"], &replaced["blocks_copied"]), (&2.into(), &256.into()));
    (pool.nodes[0], pool.urls[0]) = (node, url);
    for (replica, is_there) in [("1", true), ("2", false)] {
        let again = pool.run(&["volume", "replace", "v", "--replica", replica, "--by", &pool.urls[1]]);
        match is_there {
            true => assert!(again.done().text().contains("0 blocks copied")),
            false => drop(again.refused("already; choose a node without a member")),
        }
    }
    assert_eq!(pool.read("v", 0, MIB), written);
    let scrub = |pool: &Pool| pool.run(&["volume", "scrub", "v", "--json", "--quiet"]).done().json();
    assert_eq!((&scrub(&pool)["repaired"], &scrub(&pool)["incomplete"]), (&0.into(), &0.into()));

    // A node comes back without its memory.
    pool.nodes[1].kill();
    std::fs::remove_file(pool.folder.path().join("memory-1")).expect("its memory");
    let (node, _) = pool.serve_tcp(1, &pool.urls[1]);
    pool.nodes[1] = node;
    let stat = pool.run(&["volume", "stat", "v"]).done();
    assert!(stat.text().contains("'farside heal' replaces it"), "{}", stat.text());
    assert_eq!(pool.read("v", 0, MIB), written);
    let healed = pool.run(&["heal"]).done();
    assert!(healed.text().contains("which had lost its memory"), "{}", healed.text());
    // It and the one that moved are enough.
    pool.nodes[2].kill();
    assert_eq!(pool.read("v", 0, MIB), written);
}

#[test]
fn a_store_of_locks_is_as_large_as_its_quota_and_has_memory_for_all_blocks() {
    let pool = Pool::start(3, "24MiB");
    pool.run(&["store", "create", "v", "--kind", "abd-lock", "--quota", "8MiB"]).done();
    let stat = pool.run(&["volume", "stat", "v"]).done();
    let stat = stat.text();
    assert!(stat.contains("group 0: 1"), "more than 1000 blocks of 4 KiB: {stat}");
    assert_eq!(stat.matches("has memory for all blocks").count(), 3, "{stat}");
    pool.run(&["store", "create", "one", "--kind", "abd-lock", "--quota", "4MiB", "--members", "1"]).done();
}

/// The memory ends within one call, after the first block of it was written.
#[test]
fn a_write_that_has_written_a_block_never_says_that_nothing_was_written() {
    const BLOCK: usize = 32 << 10;
    let pool = Pool::start(3, "24MiB");
    let connected = pool.open();
    let new = farside::volume::NewVolume {
        quota: Some(4 << 20),
        block: BLOCK as u32,
        ..farside::volume::NewVolume::new("v", 256 * BLOCK as u64)
    };
    connected.create_volume(&new).expect("the nodes have memory");
    let open = || Volume::open(&connected, "v").expect("the volume");
    let mut volume = open();
    let mut at = 0;
    while connected.volume_stat("v").expect("all nodes serve").groups[0]
        .replicas
        .iter()
        .all(|replica| replica.memory.as_ref().is_ok_and(|memory| memory.buffers_free > 1))
    {
        volume.write_at(at, &[1; BLOCK]).expect("there is memory");
        at += BLOCK as u64;
    }
    let error = open().write_at(at, &[2; 8 * BLOCK]).expect_err("there is memory for one block");
    let mut read = [0; BLOCK];
    volume.read_at(at, &mut read).expect("all nodes serve");
    assert_eq!(read, [2; BLOCK], "the first block was written: {error}");
    assert_ne!(error.ran(), farside::Ran::No, "{error}");
}

#[test]
fn a_program_reads_and_writes_a_volume_at_any_offset() {
    let pool = Pool::start(3, "24MiB");
    let connected = pool.open();
    let new = farside::volume::NewVolume {
        quota: Some(8 << 20),
        block: 512,
        ..farside::volume::NewVolume::new("v", 5000)
    };
    let info = connected.create_volume(&new).expect("the nodes have memory");
    assert_eq!((info.size, info.block, info.groups), (5120, 512, 1));
    let mut volume = Volume::open(&connected, "v").expect("the volume").with_in_flight(64);
    assert_eq!((volume.size(), volume.block_len(), volume.kind()), (5120, 512, "prism-rs"));
    let mut expected = vec![0; 5120];
    for (turn, (offset, len)) in
        [(0, 5120), (1, 1), (511, 2), (512, 512), (100, 4000), (5119, 1), (5120, 0), (700, 9)]
            .into_iter()
            .enumerate()
    {
        let written = bytes(len, turn as u64 + 7);
        volume.write_at(offset as u64, &written).expect("all nodes serve");
        expected[offset..offset + len].copy_from_slice(&written);
        let mut read = vec![0; 5120 - offset / 2];
        volume.read_at((offset / 2) as u64, &mut read).expect("all nodes serve");
        assert_eq!(read, expected[offset / 2..], "after turn {turn}");
    }
    let beyond = volume.write_at(5119, b"ab").expect_err("the volume ends before");
    assert!(beyond.to_string().contains("not all within it"), "{beyond}");
    assert_eq!(beyond.ran(), farside::Ran::No);
    assert!(volume.read_at(u64::MAX, &mut [0]).is_err());
    let mut other = Volume::open(&connected, "v").expect("the volume");
    other.write_at(0, &[1; 512]).expect("all nodes serve");
    let found = volume.scrub(0..10, Some(1 << 30), |_| {}).expect("all nodes serve");
    assert_eq!((found.blocks, found.damaged, found.incomplete), (10, 0, 0));
    assert!(volume.scrub(0..11, None, |_| {}).is_err(), "there are 10 blocks");
}

#[test]
fn bench_blocks_reports_as_ycsb_does() {
    let report = farside([
        "bench",
        "blocks",
        "--fabric",
        "local",
        "--blocks",
        "100",
        "--operations",
        "400",
        "--block",
        "512",
        "--distribution",
        "zipfian:0.5",
        "--reads",
        "0.25",
        "--verify",
        "--tasks",
        "4",
        "--warm-up",
        "10ms",
        "--json",
    ])
    .done()
    .json();
    assert_eq!(
        (&report["system"], &report["fabric"], &report["replicas"]),
        (&"prism-rs".into(), &"local".into(), &3.into())
    );
    assert_eq!((&report["records"], &report["value_size"]), (&100.into(), &512.into()));
    assert_eq!((&report["distribution"], &report["verified"]), (&"zipfian:0.5".into(), &true.into()));
    assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()));
    let count = |kind: &str| report["operations"][kind]["count"].as_u64().unwrap_or(0);
    assert_eq!(count("read") + count("update"), 400, "{report}");
    assert!(count("update") > count("read"), "{report}");
    // On mapped memory each replica's chain is a trip of its own.
    let trips = report["per_op"]["round_trips"].as_f64().expect("a number");
    // The operations of the warm-up count here, too: 0.25 * 3 + 0.75 * 6 = 5.25, and claims.
    assert!((4.9..5.6).contains(&trips), "a write asks all three replicas twice, a read once: {trips}");
    let rival = farside([
        "bench",
        "blocks",
        "--system",
        "abd-lock",
        "--fabric",
        "tcp",
        "--blocks",
        "50",
        "--operations",
        "200",
        "--block",
        "512",
        "--verify",
        "--tasks",
        "4",
        "--warm-up",
        "10ms",
        "--json",
    ]);
    let rival = rival.done().json();
    assert_eq!(
        (&rival["system"], &rival["errors"], &rival["violations"]),
        (&"abd-lock".into(), &0.into(), &0.into())
    );
    for (flags, remedy) in [
        (["--reads", "2"], "give 0 to 1"),
        (["--replicas", "2"], "give 1, 3 or 5"),
        (["--distribution", "zipf"], "unknown distribution 'zipf'"),
        (["--system", "pilaf"], "prism-rs"),
    ] {
        farside(["bench", "blocks"].into_iter().chain(flags)).refused(remedy);
    }
}

#[test]
fn bench_blocks_goes_on_when_a_node_is_killed() {
    let mut pool = Pool::over_tcp("256MiB");
    let mut bench = command();
    bench.args([
        "bench",
        "blocks",
        "--block",
        "512",
        "--blocks",
        "500",
        "--seconds",
        "1.5",
        "--verify",
        "--json",
    ]);
    bench.args(["--warm-up", "50ms", "--pool", &pool.url()]);
    let log = pool.folder.path().join("log-of-bench");
    let mut bench = Process::start(bench, log.clone());
    let has_begun = |log: &Path| std::fs::read_to_string(log).unwrap_or_default().contains("measuring for");
    until("it measures", || has_begun(&log) || bench.has_ended());
    std::thread::sleep(std::time::Duration::from_millis(500));
    pool.nodes[1].kill();
    let report: Value = serde_json::from_str(&bench.line()).expect("a report");
    assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{report}");
    assert_eq!(bench.ended(), Some(0), "{}", bench.log());
    // The store of the run is dropped: the other nodes have none.
    let left = farside(["volume", "list", "--pool", &pool.url()]).done();
    assert!(left.text().is_empty() || bench.log().contains("may still exist"), "{}", left.text());
}

#[test]
fn bench_blocks_checks_an_existing_volume_while_a_node_is_wiped_and_healed() {
    let mut pool = Pool::start(3, "24MiB");
    pool.run(&["volume", "create", "v", "--size", "200KiB", "--block", "512", "--quota", "12MiB"]).done();
    pool.write("v", 0, &[7; 1000]).done();
    let (url, log_of_bench) = (pool.url(), pool.folder.path().join("log-of-bench"));
    let bench = |more: &[&str]| {
        let mut bench = command();
        bench
            .args(["bench", "blocks", "--volume", "v", "--verify", "--json", "--warm-up", "50ms"])
            .args(more);
        bench.args(["--pool", &url]);
        Process::start(bench, log_of_bench.clone())
    };
    let has_begun = || std::fs::read_to_string(&log_of_bench).unwrap_or_default().contains("measuring for");
    let mut running = bench(&["--seconds", "2"]);
    until("it measures", || has_begun() || running.has_ended());
    pool.nodes[2].kill();
    let socket = pool.folder.path().join("node-2.sock");
    let node = serve(&socket, &["--memory", "24MiB"], pool.folder.path().join("log-2"));
    node.line();
    pool.nodes[2] = node;
    let healed = pool.run(&["heal"]).done();
    assert!(healed.text().contains("which had lost its memory"), "{}", healed.text());
    let report: Value = serde_json::from_str(&running.line()).expect("a report");
    assert_eq!((&report["errors"], &report["violations"]), (&0.into(), &0.into()), "{report}");
    assert_eq!((&report["records"], &report["value_size"]), (&400.into(), &512.into()));
    assert_eq!((&report["read_back"], &report["replicas"]), (&400.into(), &3.into()));
    let slowest = report["latency_us"]["max"].as_f64().expect("a number") / 1e3;
    let stall = report["longest_stall_ms"].as_f64().expect("a number");
    // A histogram's maximum is rounded.
    assert!(stall > 0.99 * slowest, "no operation lasts longer than the longest stall: {report}");
    assert_eq!(running.ended(), Some(0), "{}", running.log());
    // The volume is kept, with blocks of the run only.
    assert!(pool.run(&["volume", "list"]).done().text().contains("v\tprism-rs"));
    assert_ne!(pool.read("v", 0, 1000), vec![7; 1000]);

    // Another client's write in the middle of the run is a violation.
    let mut running = bench(&["--seconds", "1", "--reads", "1"]);
    until("it measures", || has_begun() || running.has_ended());
    pool.write("v", 512, &[9; 512]).done();
    let report: Value = serde_json::from_str(&running.line()).expect("a report");
    assert!(report["violations"].as_u64().is_some_and(|violations| violations > 0), "{report}");
    assert_eq!(running.ended(), Some(2), "{}", running.log());

    let refused = |arguments: &[&str], reason: &str| {
        pool.run(&[&["bench", "blocks", "--volume"], arguments].concat()).refused(reason);
    };
    refused(&["none"], "there is no volume 'none'");
    refused(&["v", "--blocks", "5"], "cannot be used with");
    farside(["bench", "blocks", "--volume", "v"]).refused("--pool");
}

#[test]
fn bench_blocks_refuses_a_volume_of_several_stores() {
    let pool = Pool::start(6, "16MiB");
    pool.run(&["volume", "create", "v", "--size", "50KiB", "--quota", "4MiB"]).done();
    pool.run(&["bench", "blocks", "--volume", "v"]).refused(
        "volume 'v' has 2 groups, and one store is measured: use a volume that was created with --groups 1",
    );
}
