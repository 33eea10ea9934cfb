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
use farside_sim::world::{MILLIS, Nanos, ProcessId, SECONDS};
use farside_systems::members::{self, New, WithoutFirst};
use std::rc::Rc;

/// Usual pause, in nanoseconds, after which an operator looks whether a client has opened the store.
const LOOKS_AGAIN: Nanos = 5 * MILLIS;

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
    if let Some(process) = scene.operator.get() {
        scene.world.kill(process);
    }
    start_operator(scene);
}

/// Starts an operator, unless the present store was opened by a client, or the trial is over and each node was asked.
fn start_operator(scene: &Rc<Scene>) {
    let process = scene.world.start_process();
    scene.operator.set(Some(process));
    let (theirs, store) = (Rc::clone(scene), scene.sites[0].store.get());
    scene.world.on_death(process, move || {
        let is_needed = move |scene: &Scene| scene.sites[0].store.get() == store && is_missing(scene);
        if is_needed(&theirs) {
            let again = Rc::clone(&theirs);
            theirs.world.at(theirs.world.now() + AGAIN, move || {
                if is_needed(&again) {
                    start_operator(&again);
                }
            });
        }
    });
    let theirs = Rc::clone(scene);
    scene.world.spawn(process, async move {
        let pool = connected(&theirs, process).await;
        let nodes = theirs.sites.len() as u32;
        loop {
            theirs.sites.iter().for_each(|site| mishaps::mend_disk(site));
            for before in 1..store {
                // What is left of it is dropped in a later round.
                let _ = members::drop_store(&pool, nodes, &name_of(before), WithoutFirst::Forget).await;
            }
            let _ = members::create(&pool, nodes, &described(&theirs), attempt(&theirs)).await;
            theirs.world.sleep(theirs.world.random().heavy(LOOKS_AGAIN)).await;
            if !is_missing(&theirs) {
                return pool.close().await;
            }
        }
    });
}

/// Whether clients still need the present store, and none of them has opened it yet.
fn is_missing(scene: &Scene) -> bool {
    !scene.sites[0].is_opened.get() && !scene.is_over()
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
