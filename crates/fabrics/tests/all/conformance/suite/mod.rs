//! The conformance suite: a list of claims, checked on each fabric under each executor.

mod chains;
pub(crate) mod claims;
pub(crate) mod executors;
pub(crate) mod rig;
mod twin;

/// Defines one test per claim and executor (ours and tokio's) for the fabric of `$rig`. Every test has the attributes.
macro_rules! conformance {
    ($(#[$attribute:meta])* $fabric:ident, $($rig:tt)+) => {
        mod $fabric {
            mod core {
                every_claim!([$(#[$attribute])*] Core, $($rig)+);
            }
            mod tokio {
                every_claim!([$(#[$attribute])*] Tokio, $($rig)+);
            }
        }
    };
}

macro_rules! every_claim {
    ($attributes:tt $executor:ident, $($rig:tt)+) => {
        claims! {
            $attributes, $executor, [$($rig)+];
            every_op_does_what_run_says
            the_rest_of_a_chain_depends_on_the_previous_op
            a_chain_has_at_most_64_ops_and_all_of_them_run
            an_output_that_exceeds_the_reply_is_too_long
            a_payload_of_60_kib_arrives_intact
            a_chain_that_finds_no_buffer_runs_nothing
            a_wrong_key_gives_no_access
            another_node_is_an_error
            scratch_is_private_to_a_chain_and_zero_at_its_start
            a_dropped_run_does_no_harm
            unpublished_buffers_of_a_dropped_chain_are_freed
            only_live_buffers_are_retired
            unreachable_buffers_are_freed
            sixty_four_tasks_run_concurrently
            additions_by_many_threads_sum_up
            sixteen_bytes_never_tear
            a_call_that_cannot_be_served_is_refused
            a_stores_service_handles_one_call_at_a_time
            a_stores_service_requires_the_stores_key
            an_unanswered_call_ends_at_its_deadline
            a_request_after_an_idle_second_works_and_idling_is_cheap
        }
    };
}

macro_rules! claims {
    ($attributes:tt, $executor:ident, $rig:tt; $($claim:ident)*) => {
        $(claim!($attributes, $executor, $rig, $claim);)*
    };
}

macro_rules! claim {
    ([$($attribute:tt)*], $executor:ident, $rig:tt, $claim:ident) => {
        #[test]
        $($attribute)*
        fn $claim() {
            use $crate::conformance::suite::{claims, executors::Executor};
            claims::$claim(&started!($rig), Executor::$executor);
        }
    };
}

macro_rules! started {
    ([$($rig:tt)+]) => {{
        #[allow(unused_imports, reason = "some rigs take others")]
        use $crate::conformance::suite::rig::*;
        <$($rig)+ as Rig>::start()
    }};
}
