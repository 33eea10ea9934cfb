//! The checks of scans find what is wrong with a scan. The index is a map that each test breaks.

use super::*;
use farside_systems::index::Keys;
use std::collections::BTreeMap;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

/// A map that may skip a key, visit one twice, exchange two keys, or return a former value.
#[derive(Default)]
struct Map {
    content: BTreeMap<Vec<u8>, Vec<u8>>,
    fault: Option<Broken>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Skips,
    EndsEarly,
    Repeats,
    Exchanges,
    Tears,
}

impl Index for Map {
    fn kind(&self) -> &'static str {
        "map"
    }

    fn keys(&self) -> Keys {
        Keys::Numbers
    }

    fn value_max(&self) -> usize {
        1 << 10
    }

    async fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, IndexError> {
        Ok(self.content.get(key).map(Vec::as_slice))
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.content.insert(key.to_vec(), value.to_vec());
        Ok(())
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        let is_absent = !self.content.contains_key(key);
        if is_absent {
            self.put(key, value).await?;
        }
        Ok(is_absent)
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, IndexError> {
        Ok(self.content.remove(key).is_some())
    }

    async fn scan(
        &mut self,
        from: &[u8],
        limit: usize,
        mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError> {
        let mut found: Vec<(Vec<u8>, Vec<u8>)> =
            self.content.range(from.to_vec()..).map(|(key, value)| (key.clone(), value.clone())).collect();
        match self.fault {
            Some(Broken::Skips) => drop(found.remove(1)),
            Some(Broken::EndsEarly) => found.truncate(2),
            Some(Broken::Repeats) => found[1] = found[0].clone(),
            Some(Broken::Exchanges) => found.swap(0, 1),
            Some(Broken::Tears) => found[1].1[0] ^= 1,
            None => {}
        }
        found.truncate(limit);
        found.iter().for_each(|(key, value)| visit(key, value));
        Ok(found.len())
    }
}

fn now<O>(future: impl Future<Output = O>) -> O {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("a map does not wait"),
    }
}

const RECORDS: u64 = 10;

fn loaded(kind: NameKind, verify: bool) -> (Run, Map, Task) {
    let mut workload = Workload::resolve("e").expect("a workload");
    workload.records = RECORDS;
    let plan = Plan { workload, value_size: 64, kind, tasks: 1, verify, sampled: 1, seed: 1 };
    let (run, mut map) = (plan.run().expect("a run"), Map::default());
    let mut task = run.work().task(0);
    for record in 0..RECORDS {
        now(run.work().load(&mut map, record, &mut task)).expect("loaded");
    }
    (run, map, task)
}

fn drawn(operation: Operation, key: u64, len: u32) -> Drawn {
    Drawn { of: kv::Drawn { key, operation }, len }
}

#[test]
fn a_right_scan_is_accepted_and_each_wrong_one_is_found() {
    for (kind, verify) in [
        (NameKind::Numbers, false),
        (NameKind::Numbers, true),
        (NameKind::Emails, false),
        (NameKind::Emails, true),
    ] {
        let (run, mut map, mut task) = loaded(kind, verify);
        for (first, len) in [(0, 1), (0, 5), (3, 7), (3, 100), (9, 1), (9, 100)] {
            now(run.work().perform(&mut map, drawn(Operation::Scan, first, len), &mut task)).expect("right");
        }
        for broken in [Broken::Skips, Broken::EndsEarly, Broken::Repeats, Broken::Exchanges, Broken::Tears] {
            map.fault = Some(broken);
            let scanned = now(run.work().perform(&mut map, drawn(Operation::Scan, 2, 5), &mut task));
            let trouble = scanned.expect_err("it is wrong");
            assert_eq!(trouble.fault(), Fault::Violated, "{kind:?} {verify} {broken:?}: {trouble}");
        }
        map.fault = None;
        now(run.work().perform(&mut map, drawn(Operation::Scan, 2, 5), &mut task)).expect("right");
    }
}

#[test]
fn an_old_value_in_a_scan_is_found_with_verification() {
    let (run, mut map, mut task) = loaded(NameKind::Numbers, true);
    let old = map.content.clone();
    now(run.work().perform(&mut map, drawn(Operation::Update, 4, 0), &mut task)).expect("put");
    now(run.work().perform(&mut map, drawn(Operation::Scan, 0, 10), &mut task)).expect("the new value");
    map.content = old;
    let scanned = now(run.work().perform(&mut map, drawn(Operation::Scan, 0, 10), &mut task));
    assert!(matches!(scanned, Err(IndexTrouble::Violated(verify::Violation::WentBack { key: 4, .. }))));
}

#[test]
fn an_insert_extends_what_a_scan_must_visit() {
    for verify in [false, true] {
        let (run, mut map, mut task) = loaded(NameKind::Numbers, verify);
        now(run.work().perform(&mut map, drawn(Operation::Insert, 0, 0), &mut task)).expect("inserted");
        assert_eq!(map.content.len() as u64, RECORDS + 1);
        now(run.work().perform(&mut map, drawn(Operation::Scan, 8, 9), &mut task)).expect("right");
        map.content.pop_last();
        let scanned = now(run.work().perform(&mut map, drawn(Operation::Scan, 8, 9), &mut task));
        assert!(scanned.is_err(), "the new record is missing");
    }
}

#[test]
fn lengths_of_scans_are_uniform_from_1_to_the_longest() {
    let (run, ..) = loaded(NameKind::Numbers, false);
    let mut source = run.work().source(workload::random(7));
    let drawn: Vec<Drawn> = (0..100_000).map(|_| IndexWork::draw(&mut source)).collect();
    let lens: Vec<u32> =
        drawn.iter().filter(|drawn| drawn.of.operation == Operation::Scan).map(|drawn| drawn.len).collect();
    assert!((lens.len() as f64 / 1e5 - 0.95).abs() < 0.01);
    let mean = lens.iter().map(|&len| f64::from(len)).sum::<f64>() / lens.len() as f64;
    assert_eq!((lens.iter().min(), lens.iter().max()), (Some(&1), Some(&100)));
    assert!((mean - 50.5).abs() < 0.5, "{mean}");
}
