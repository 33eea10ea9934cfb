//! Stores whose tables are rebuilt while clients use them over every fabric, and nodes that die during a rebuild.

use crate::faults::connect;
use crate::support::{Node, serve, until};
use farside::local::Client;
use farside::{NewStore, Pool};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Rebuilds the store's table as often as possible until `until`; returns the number of rebuilds.
fn rebuild_until(pool: &Pool, until: Instant) -> u64 {
    let mut rebuilt = 0;
    while Instant::now() < until {
        let items = [1, 700, 6000][rebuilt as usize % 3];
        rebuilt += u64::from(pool.rebuild_store("s", Some(items)).is_ok());
        std::thread::sleep(Duration::from_millis(5));
    }
    rebuilt
}

fn is_whole(pool: &Pool) -> bool {
    pool.stores().expect("the list of stores").iter().all(|store| store.former.is_none())
}

#[test]
fn clients_of_every_fabric_lose_nothing_during_rebuilds() {
    let folder = tempfile::tempdir().expect("a folder");
    let ring = format!("ring:{}", folder.path().join("ring.sock").display());
    let listen = ["--listen", "udp://127.0.0.1:0", "--listen", "tcp://127.0.0.1:0", "--listen", &ring];
    let node = Node::with(&[&["--memory", "96MiB"][..], &listen].concat());
    let shm = connect(&node.url());
    shm.create_store(&NewStore { items: Some(1), ..NewStore::prism_kv("s", 32 << 20) })
        .expect("the node has memory");
    let mut urls = shm.info().expect("the node serves").listening;
    urls.push(node.url());
    assert_eq!(urls.len(), 4, "{urls:?}");
    let end = Instant::now() + Duration::from_secs(3);
    std::thread::scope(|scope| {
        let workers: Vec<_> = urls
            .iter()
            .map(|url| {
                scope.spawn(move || {
                    let pool = connect(url);
                    let mut one = Client::open(&pool, "s").expect("a store").with_slot_cache(10);
                    // Many tasks share one session. Each task learns the new table's key at another time.
                    let many = pool.open("s").expect("a store");
                    let mut rounds = 0u64;
                    while Instant::now() < end {
                        rounds += 1;
                        let key = |n: u64| format!("{url} {n}").into_bytes();
                        let value = |n: u64| {
                            vec![n as u8; if n == 7 { 100_000 } else { 100 + (rounds % 90) as usize }]
                        };
                        one.put(&key(rounds % 20), &value(rounds % 20)).expect("stored");
                        let read = one.get(&key(rounds % 20)).expect("read").expect("present");
                        assert!(read.value == value(rounds % 20), "{url}");
                        if rounds.is_multiple_of(8) {
                            let puts: Vec<_> = (20..60).map(|n| many.put(key(n), value(n))).collect();
                            puts.into_iter().for_each(|put| put.wait().expect("stored"));
                            let gets: Vec<_> = (20..60).map(|n| (n, many.get(key(n)))).collect();
                            for (n, get) in gets {
                                assert!(
                                    get.wait().expect("read").expect("present").value == value(n),
                                    "{url}"
                                );
                            }
                            let dels: Vec<_> = (20..60).map(|n| many.delete(key(n))).collect();
                            assert!(dels.into_iter().all(|del| del.wait().expect("deleted")));
                        }
                    }
                    (url, rounds)
                })
            })
            .collect();
        let rebuilt = rebuild_until(&shm, end);
        let rounds: Vec<_> =
            workers.into_iter().map(|worker| worker.join().expect("no worker panics")).collect();
        println!("{rebuilt} rebuilds under {rounds:?}");
        assert!(rebuilt > 10, "{rebuilt}");
    });
    until("the last rebuild completes", || is_whole(&shm));
    // All clients have stopped: only readable items are live.
    until("all retired buffers are free", || {
        let stat = shm.stat("s").expect("figures");
        stat.retired_buffers == 0 && stat.live_buffers < 4 * 60 * 2 + 10
    });
    let refusals = shm.info().expect("the node serves").refusals;
    assert_eq!((refusals.wrong_keys, refusals.bad_secrets), (0, 0), "the use of a former key is not a guess");
    let mut client = Client::open(&shm, "s").expect("a store");
    for url in &urls {
        assert!(client.get(format!("{url} 3").as_bytes()).expect("read").is_some());
        assert!(client.get(format!("{url} 33").as_bytes()).expect("read").is_none());
    }
}

#[test]
fn a_node_killed_during_a_rebuild_resumes_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("memory").display().to_string();
    let socket = folder.path().join("node.sock");
    let start = |listen: &str, round: u64| {
        let arguments = ["--memory", "96MiB", "--memory-file", &file, "--listen", listen];
        let process = serve(&socket, &arguments, folder.path().join(format!("{round}")));
        assert!(process.line().contains("serves"));
        process
    };
    let mut node = start("tcp://127.0.0.1:0", 0);
    let info = connect(&format!("shm:{}", socket.display())).info().expect("the node serves");
    let url = info.listening[0].clone();
    connect(&url)
        .create_store(&NewStore { items: Some(1), ..NewStore::prism_kv("s", 32 << 20) })
        .expect("the node has memory");
    let mut expected: BTreeMap<Vec<u8>, Vec<u8>> = BTreeMap::new();
    let (mut in_the_middle, mut number) = (0, 0u64);
    for round in 1..=12u64 {
        let pool = connect(&url);
        let client = pool.open("s").expect("a store");
        let puts: Vec<_> = (0..3000)
            .map(|_| {
                number += 1;
                let (key, value) = ((number % 5000).to_le_bytes().to_vec(), number.to_le_bytes().to_vec());
                expected.insert(key.clone(), value.clone());
                client.put(key, value)
            })
            .collect();
        puts.into_iter().for_each(|put| put.wait().expect("stored"));
        // The store may be growing by itself.
        until("the rebuild starts", || pool.rebuild_store("s", Some(20_000 + 100 * round)).is_ok());
        std::thread::sleep(Duration::from_micros(300 * round));
        in_the_middle += u64::from(!is_whole(&pool));
        node.kill();
        drop((client, pool));
        node = start(&url, round);
        let pool = connect(&url);
        let client = pool.open("s").expect("a store");
        let gets: Vec<_> =
            expected.iter().map(|(key, value)| (key, value, client.get(key.clone()))).collect();
        for (key, value, get) in gets {
            let read = get.wait().expect("read").map(|item| item.value.to_vec());
            assert!(read.as_ref() == Some(value), "round {round}, key {key:?}");
        }
        until("the rebuild completes", || is_whole(&pool));
        until("only one table is left", || {
            let store = &pool.stores().expect("the list of stores")[0];
            pool.stat("s").expect("figures").table_bytes == store.table_len
        });
    }
    println!("{in_the_middle} of 12 nodes died in the middle of a rebuild");
    assert!(in_the_middle > 0);
}
