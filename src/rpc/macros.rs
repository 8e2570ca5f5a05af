//! The declaration of remote functions.

/// Declares functions that other ranks can call.
///
/// Each becomes a function that names it, `fn() -> `[`Remote`](crate::rpc::Remote), to be passed to [`call`](crate::Calls::call) and its kin.
/// The first parameter is the [`Scope`](crate::Scope) that the function runs in; the others, and the result, are serde types that may hold
/// [`Tensor`](crate::Tensor)s and [`RRef`](crate::RRef)s. The result is a [`Result`](crate::Result). A result that doesn't
/// implement `Serialize` can't be called for, only created on its owner ([`remote`](crate::Calls::remote)).
///
/// A second parameter `&mut T` makes it a function on a `T` that a reference names: for [`call_mut`](crate::Calls::call_mut).
/// With `on_main` in front, `&mut T` is the state given to [`World::serve_with`](crate::World::serve_with), and the function
/// runs on the main thread.
///
/// ```
/// use rankgrad::prelude::*;
///
/// remote! {
///     /// Sum of a tensor on another rank.
///     fn total(scope: &Scope, x: Tensor) -> Result<f64> {
///         let _here = scope.rank();
///         x.sum()?.item()
///     }
/// }
///
/// rankgrad::local::run(2, |world| {
///     world.lead(|world| {
///         let x = Tensor::from_vec(vec![1.0, 2.0, 3.0], [3])?;
///         assert_eq!(world.call(1, total, (x,))?, 6.0);
///         Ok(())
///     })
/// })
/// # .unwrap();
/// ```
///
/// Each parameter is `name: Type`, the first is `scope: &Scope`; there are no generics and no patterns (`mut x` either).
///
/// A function that isn't declared so can't be called:
///
/// ```compile_fail
/// # use rankgrad::prelude::*;
/// fn plain(scope: &Scope, x: Tensor) -> Result<f64> {
///     x.sum()?.item()
/// }
/// # fn test(world: &World, x: Tensor) -> Result<f64> {
/// world.call(1, plain, (x,))
/// # }
/// ```
#[macro_export]
macro_rules! remote {
    () => {};

    ($(#[$meta:meta])* $vis:vis on_main fn $name:ident($scope:ident: &Scope, $state:ident: &mut $state_type:ty $(, $arg:ident: $type:ty)* $(,)?)
        -> $result:ty $body:block $($rest:tt)*) => {
        $crate::remote!(@declare [$(#[$meta])*] [$vis] $name [($($type,)*)] [$result] true
            [(on_main $state_type, $($type),*)]
            (scope, arguments, main) {
                fn __body($scope: &$crate::Scope, $state: &mut $state_type $(, $arg: $type)*) -> $result $body
                let ($($arg,)*): ($($type,)*) = arguments.decode()?;
                let state = $crate::rpc::main_state::<$state_type>(scope, stringify!($name), main)?;
                __body(scope, state $(, $arg)*)
            });
        $crate::remote!($($rest)*);
    };

    ($(#[$meta:meta])* $vis:vis fn $name:ident($scope:ident: &Scope, $this:ident: &mut $this_type:ty $(, $arg:ident: $type:ty)* $(,)?)
        -> $result:ty $body:block $($rest:tt)*) => {
        $crate::remote!(@declare [$(#[$meta])*] [$vis] $name [$crate::rpc::On<$this_type, ($($type,)*)>] [$result] false
            [(on $this_type, $($type),*)]
            (scope, arguments, _main) {
                fn __body($scope: &$crate::Scope, $this: &mut $this_type $(, $arg: $type)*) -> $result $body
                let (this, ($($arg,)*)): ($crate::RRef<$this_type>, ($($type,)*)) = arguments.decode()?;
                $crate::rpc::on_value(scope, &this, move |this| __body(scope, this $(, $arg)*))
            });
        $crate::remote!($($rest)*);
    };

    ($(#[$meta:meta])* $vis:vis fn $name:ident($scope:ident: &Scope $(, $arg:ident: $type:ty)* $(,)?)
        -> $result:ty $body:block $($rest:tt)*) => {
        $crate::remote!(@declare [$(#[$meta])*] [$vis] $name [($($type,)*)] [$result] false
            [($($type),*)]
            (scope, arguments, _main) {
                fn __body($scope: &$crate::Scope $(, $arg: $type)*) -> $result $body
                let ($($arg,)*): ($($type,)*) = arguments.decode()?;
                __body(scope $(, $arg)*)
            });
        $crate::remote!($($rest)*);
    };

    (@declare [$(#[$meta:meta])*] [$vis:vis] $name:ident [$arguments:ty] [$result:ty] $on_main:literal [$signature:tt]
        ($scope_in:ident, $arguments_in:ident, $main_in:ident) { $($steps:tt)* }) => {
        $(#[$meta])*
        $vis fn $name() -> $crate::rpc::Remote<$arguments, <$result as $crate::rpc::Outcome>::Value> {
            fn run(
                $scope_in: &$crate::Scope,
                $arguments_in: $crate::rpc::Incoming,
                $main_in: ::core::option::Option<&mut dyn ::core::any::Any>,
                keep: bool,
            ) -> $crate::Result<$crate::rpc::Given> {
                #[allow(unused_imports)]
                use $crate::rpc::{Encodable as _, HasParameters as _, NoParameters as _, Opaque as _};
                let value = $crate::rpc::outcome({ $($steps)* })?;
                let probe = &$crate::rpc::Probe::<<$result as $crate::rpc::Outcome>::Value>(::core::marker::PhantomData);
                $crate::rpc::give($scope_in, REGISTRATION.path(), value, keep, probe.encoder(), probe.list())
            }
            static REGISTRATION: $crate::rpc::Registration = $crate::rpc::Registration::new(
                concat!(module_path!(), "::", stringify!($name)),
                concat!(stringify!($signature), " -> ", stringify!($result)),
                $on_main,
                run,
            );
            $crate::rpc::inventory::submit! { $crate::rpc::Entry(&REGISTRATION) }
            $crate::rpc::Remote::new(&REGISTRATION)
        }
    };
}
