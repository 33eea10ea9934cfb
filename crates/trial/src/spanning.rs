//! Stores that lie on all nodes: their creation, and their replacement by other stores once they are lost or revoked.
//!
//! Of a store without replicas, each member holds a part that no other one has. Once one member is lost, the store is
//! lost, and an operator drops the rest of it and creates another store. In the history, the keys of the other store
//! are new keys.
//!
//! Invariant: at most one operator works at a time. An operator that dies is followed by another one.
//! Invariant: an operator repeats its requests until a client has opened the store, so that no lost message matters.

use crate::pool::{Pool, Reach};
use crate::{AGAIN, Scene, mishaps, name_of};
use farside_sim::clock::ProcessClock;
use farside_sim::fault::Target;
use farside_sim::world::{MILLIS, Nanos, ProcessId, SECONDS, within};
use farside_systems::members::{self, New, WithoutFirst};
use farside_systems::store::StoreError;
use std::rc::Rc;

/// Longest time, in nanoseconds, for which an operator waits for an answer before it goes on.
const PATIENCE: Nanos = 200 * MILLIS;
/// Usual pause, in nanoseconds, after which an operator looks whether a client has opened the store.
const LOOKS_AGAIN: Nanos = 5 * MILLIS;
/// Longest such pause. A longer one would end the trial before its operations.
const LOOKS_AGAIN_MAX: Nanos = SECONDS;

/// Creates the store, before any fault.
pub(crate) fn create(scene: &Rc<Scene>) {
    let (theirs, process) = (Rc::clone(scene), scene.world.start_process());
    let created = scene.world.complete(SECONDS, async move {
        let pool = connected(&theirs, process).await;
        members::create(&pool, theirs.sites.len() as u32, &described(&theirs), attempt(&theirs)).await
    });
    scene.world.kill(process);
    if !matches!(&created, Some(Ok(stores)) if stores.len() == scene.drawn.nodes as usize) {
        scene.blame(format!("the store was not created: {created:?}"));
    }
}

/// Makes an operator drop the present store, which is lost or revoked, and create the next one.
pub(crate) fn replace(scene: &Rc<Scene>) {
    scene.sites.iter().for_each(|site| site.begin_store());
    if let Some(process) = scene.operator.take() {
        scene.world.kill(process);
    }
    start_operator(scene);
}

/// Starts an operator. It ends when a client has opened the present store and all former ones are dropped.
fn start_operator(scene: &Rc<Scene>) {
    let process = scene.world.start_process();
    scene.operator.set(Some(process));
    let theirs = Rc::clone(scene);
    scene.world.on_death(process, move || {
        let is_needed = move |scene: &Scene| scene.operator.get() == Some(process) && !scene.is_over();
        let again = Rc::clone(&theirs);
        theirs.world.at(theirs.world.now() + AGAIN, move || {
            if is_needed(&again) {
                start_operator(&again);
            }
        });
    });
    let theirs = Rc::clone(scene);
    scene.world.spawn(process, async move {
        let pool = connected(&theirs, process).await;
        let nodes = theirs.sites.len() as u32;
        let mut former: Vec<u32> = (1..theirs.sites[0].store.get()).collect();
        loop {
            theirs.sites.iter().for_each(|site| mishaps::mend_disk(site));
            let mut left = Vec::new();
            for store in former {
                let name = name_of(store);
                let dropping = members::drop_store(&pool, nodes, &name, WithoutFirst::Forget);
                let dropped = within(&theirs.world, PATIENCE, dropping).await;
                let is_gone = match dropped {
                    Some(Ok(silent)) => silent.is_empty(),
                    Some(Err(error)) => matches!(error, StoreError::Gone(_)),
                    None => false,
                };
                left.extend((!is_gone).then_some(store));
            }
            former = left;
            let is_opened = || theirs.sites[0].is_opened.get();
            if !is_opened() {
                let new = described(&theirs);
                let creating = members::create(&pool, nodes, &new, attempt(&theirs));
                // If it fails, it is tried again.
                let _ = within(&theirs.world, PATIENCE, creating).await;
            }
            let pause = theirs.world.random().heavy(LOOKS_AGAIN).min(LOOKS_AGAIN_MAX);
            theirs.world.sleep(pause).await;
            if is_opened() && former.is_empty() || theirs.is_over() {
                theirs.operator.set(None);
                return pool.close().await;
            }
        }
    });
}

async fn connected(scene: &Rc<Scene>, process: ProcessId) -> Reach {
    let client = scene.drawn.clients;
    let clock = ProcessClock::new(&scene.world, 0, &scene.struck, Target::Client(client));
    let pool = Pool::open(scene, client, process, &clock);
    pool.all_opened(SECONDS).await;
    Reach::Pool(pool)
}

/// Description of the present store.
fn described(scene: &Scene) -> New {
    let (name, kind) = (scene.sites[0].store_name(), scene.kind.to_owned());
    let sizing = scene.sizing.expect("the store of this family lies on all nodes");
    New { name, kind, sizing, quota: scene.drawn.quota_mib << 20, members: scene.drawn.nodes as usize }
}

fn attempt(scene: &Scene) -> [u64; 2] {
    [scene.world.random().bits(), scene.world.random().bits()]
}
