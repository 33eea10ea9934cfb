//! Long runs for `cargo xtask soak`: a store of eight million items, and an idle node.

use farside::local::Client;
use farside::{NewStore, Pool, StoreStat};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ITEMS: u64 = 8_000_000;
const VALUE: usize = 512;

struct Node {
    child: Child,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Node {
    fn start(memory: &str) -> Node {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("node.sock");
        let mut child = Command::new(env!("CARGO_BIN_EXE_farside"))
            .args(["serve", "--die-with-parent", "--memory", memory, "--socket"])
            .arg(&socket)
            .stdout(Stdio::piped())
            .spawn()
            .expect("a node");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("the node serves");
        Node { child, socket, _folder: folder }
    }

    fn pool(&self) -> Pool {
        farside::connect(&format!("shm:{}", self.socket.display())).expect("the node serves")
    }

    /// Returns the CPU time that the node has used, in clock ticks of 10 ms.
    fn ticks(&self) -> u64 {
        let stat =
            std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("the process runs");
        let fields: Vec<&str> = stat.rsplit(')').next().expect("a name").split_whitespace().collect();
        [11, 12].iter().map(|&i| fields[i].parse::<u64>().expect("ticks")).sum()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn value_of(n: u64) -> [u8; VALUE] {
    let mut value = [n as u8; VALUE];
    value[..8].copy_from_slice(&n.to_le_bytes());
    value
}

#[test]
#[ignore = "takes minutes and 7 GB: cargo xtask soak"]
fn soak_eight_million_items_are_kept_and_cost_no_idle_cpu() {
    let node = Node::start("7GiB");
    let pool = node.pool();
    pool.create_store(&NewStore { items: Some(ITEMS), ..NewStore::prism_kv("big", 6500 << 20) })
        .expect("the node has memory");
    let began = Instant::now();
    std::thread::scope(|scope| {
        for half in 0..2 {
            let pool = &pool;
            scope.spawn(move || {
                let mut client = Client::open(pool, "big").expect("open");
                for n in (half..ITEMS).step_by(2) {
                    client.put(&n.to_be_bytes(), &value_of(n)).expect("stored");
                }
            });
        }
    });
    println!("{ITEMS} items of {VALUE} bytes loaded in {:.1} s", began.elapsed().as_secs_f64());

    let mut client = Client::open(&pool, "big").expect("open");
    for n in (0..ITEMS).step_by(7) {
        let item = client.get(&n.to_be_bytes()).expect("read").expect("present");
        assert!(item.value == value_of(n), "item {n}");
    }
    let stat = stat(&pool);
    assert_eq!(stat.live_buffers, ITEMS);
    let per_item = |bytes: u64| bytes as f64 / ITEMS as f64;
    println!(
        "bytes per item: {:.1} = table {:.1} (4 slots of 16 bytes, rounded up to a power of two) + segments {:.1} \
         (buffers {:.1}: 16 header + 8 key + {VALUE} value, rounded up to the class; the rest is 16 of state and the \
         ends of segments)",
        per_item(stat.table_bytes + stat.buffer_segment_bytes),
        per_item(stat.table_bytes),
        per_item(stat.buffer_segment_bytes),
        per_item(stat.live_bytes),
    );

    let _idle: Vec<Client> = (0..3).map(|_| Client::open(&pool, "big").expect("open")).collect();
    std::thread::sleep(Duration::from_secs(2)); // An idle node polls less often.
    let before = node.ticks();
    std::thread::sleep(Duration::from_secs(10));
    let used = node.ticks() - before;
    println!(
        "idle for 10 s with 4 clients connected: {used} ticks of 10 ms, {:.2} % of a core",
        used as f64 / 10.0
    );
    assert!(used <= 10, "an idle node used {used} hundredths of a second in ten");
}

fn stat(pool: &Pool) -> StoreStat {
    // The node walks every buffer, which can exceed the call's deadline; retry until it does not.
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        match pool.stat("big") {
            Ok(stat) => return stat,
            Err(error) if Instant::now() > deadline => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}
