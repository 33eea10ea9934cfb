//! Tests of the engines that run the chains of remote sessions.

use super::services::{Home, NODE, open_key};
use farside_remote::arena::class::Class;
use farside_remote::control::{Answer, Ask};
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{ChainBuf, Fabric, Memory, Reply, allocate, retire};
use farside_sim::node::{Kinds, Options};
use farside_sim::world::{MILLIS, SECONDS};
use std::rc::Rc;

/// A store whose buffers no pointer reaches. Sessions may reuse those that they retire.
struct Buffers;

impl<M: Memory> Kind<M> for Buffers {
    fn name(&self) -> &'static str {
        "buffers"
    }

    fn permits_reuse(&self) -> bool {
        true
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        Ok(Plan { table_len: 1 << 16, parameters: parameters.to_owned(), wide: false })
    }

    fn serve(&self, _parameters: &str, _table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Buffers))
    }
}

impl<M: Memory> Service<M> for Buffers {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}

/// A client retires a buffer again and again, after pauses in which the node has seen that the engine is idle. The node
/// frees each of them, also if the engine runs each chain at one instant.
#[test]
fn a_node_takes_what_an_idle_engine_has_retired() {
    const ROUNDS: u64 = 4;
    for at_once_one_in in [0, 1] {
        let kinds: Kinds = Rc::new(|| vec![Box::new(Buffers) as Box<_>]);
        let idle_pause = [MILLIS, 4 * MILLIS];
        let options = Options { at_once_one_in, is_reliable: true, idle_pause, ..Options::default() };
        let home = Rc::new(Home::with(1, kinds, options));
        let theirs = Rc::clone(&home);
        let done = home.world.complete(20 * SECONDS, async move {
            let (name, kind, quota) = ("s".to_owned(), "buffers".to_owned(), 4 << 20);
            let created = Ask::CreateStore { name, kind, parameters: String::new(), quota };
            theirs.node.answer(created).await.expect("it has memory");
            let endpoint = theirs.connect(1).await;
            let key = open_key(&endpoint).await;
            let list = Class::for_len(8).expect("it is short").list();
            for round in 1..=ROUNDS {
                theirs.world.sleep(40 * MILLIS).await;
                let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
                let mut chain = buffer.begin(key);
                let taken = chain.also(allocate(list, [&[7; 8], &[], &[]]));
                endpoint.run(NODE, &chain, &mut reply).await.expect("it answers");
                let taken = [*reply.get(taken).expect("a buffer is free")];
                let mut chain = buffer.begin(key);
                chain.also(retire(&taken));
                endpoint.run(NODE, &chain, &mut reply).await.expect("it answers");
                theirs.world.sleep(40 * MILLIS).await;
                let stat = theirs.node.answer(Ask::StoreStat { name: "s".to_owned() }).await;
                let Ok(Answer::StoreStat(stat)) = stat else { panic!("{stat:?}") };
                assert_eq!((stat.retired_buffers, stat.live_buffers), (0, 0), "round {round}: {stat:?}");
            }
        });
        home.world.end();
        done.expect("the test ends");
    }
}
